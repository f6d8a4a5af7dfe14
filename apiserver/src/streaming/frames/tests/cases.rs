//! Frames and the messages that they become.

use super::*;

#[tokio::test]
async fn frame_of_any_size_becomes_messages_of_bounded_size() {
    for size in [0, 1, 3, 4, 125, 126, 127, 65_533, 65_535, 65_536, 65_537, 65_539, 131_071, 131_072, 131_073, 1 << 20]
    {
        let payload = pattern(size);
        for most in [7, 1000, 1 << 20] {
            let drip = Drip::new(&frame(FINAL | BINARY, &payload), most, size as u64);
            let (messages, _) = received(drip, Content::Bytes).await;
            assert_eq!(messages.len(), size.div_ceil(PIECE).max(1), "{size}");
            let mut whole = Vec::new();
            for message in messages {
                let Message::Binary(data) = message else { panic!("{message:?}") };
                assert!(data.len() <= PIECE);
                whole.extend_from_slice(&data);
            }
            assert!(whole == payload, "{size} bytes, {most} at a time");
        }
    }
}

/// The relevant part of a client's messages.
#[derive(Debug, PartialEq)]
enum Received {
    Bytes(Vec<u8>),
    Nothing,
    Ping(Vec<u8>),
}

fn push_bytes(messages: &mut Vec<Received>, bytes: &[u8]) {
    match messages.last_mut() {
        Some(Received::Bytes(before)) => before.extend_from_slice(bytes),
        _ if bytes.is_empty() => {}
        _ => messages.push(Received::Bytes(bytes.to_vec())),
    }
}

/// Some messages with their bytes on the wire, whole or in fragments, with pings and text between.
fn conversation(chance: &mut Chance, sizes: &[usize]) -> (Vec<u8>, Vec<Received>) {
    let (mut wire, mut expected) = (Vec::new(), Vec::new());
    for _ in 0..1 + chance.below(8) {
        let text = chance.below(4) == 0;
        let fragments = 1 + chance.below(5);
        let mut empty = true;
        for number in 1..=fragments {
            if chance.below(3) == 0 {
                let ping = pattern(chance.below(126));
                wire.extend(frame(FINAL | PING, &ping));
                expected.push(Received::Ping(ping));
            }
            let payload = pattern(chance.of(sizes));
            empty &= payload.is_empty();
            let opcode = if number > 1 {
                CONTINUATION
            } else if text {
                TEXT
            } else {
                BINARY
            };
            wire.extend(frame(if number == fragments { FINAL | opcode } else { opcode }, &payload));
            if !text {
                push_bytes(&mut expected, &payload);
            }
        }
        if empty && !text {
            expected.push(Received::Nothing);
        }
    }
    (wire, expected)
}

#[tokio::test]
async fn bytes_are_equal_for_all_cuts() {
    let small: &[usize] = &[0, 0, 1, 2, 3, 5, 8, 125, 126, 127, 300];
    let large: &[usize] = &[0, 1, 126, 65_534, 65_535, 65_536, 65_537, 65_538, 131_073];
    for seed in 0..400 {
        let chance = &mut Chance(seed * 7 + 1);
        let (sizes, most) =
            if seed % 8 == 0 { (large, chance.of(&[1000, 70_000])) } else { (small, chance.of(&[1, 2, 5, 40, 2000])) };
        let (wire, expected) = conversation(chance, sizes);
        let (messages, end) = received(Drip::new(&wire, most, seed), Content::Bytes).await;
        let mut found = Vec::new();
        for message in messages {
            match message {
                Message::Binary(data) if data.is_empty() => found.push(Received::Nothing),
                Message::Binary(data) => {
                    assert!(data.len() <= PIECE);
                    push_bytes(&mut found, &data);
                }
                Message::Ping(data) => found.push(Received::Ping(data.to_vec())),
                Message::Pong(data) => assert!(data.is_empty()),
                other => panic!("{other:?}"),
            }
        }
        assert!(found == expected, "seed {seed}");
        assert!(matches!(end, Error::Protocol(ProtocolError::ResetWithoutClosingHandshake)), "{end}");
    }
}

#[tokio::test]
async fn result_is_independent_of_read_sizes() {
    let wire = [
        frame(FINAL | BINARY, b"one"),
        frame(BINARY, b""),
        frame(FINAL | PING, b"alive"),
        frame(CONTINUATION, b"two"),
        frame(FINAL, b""),
        frame(FINAL | TEXT, b"text"),
        frame(BINARY, b""),
        frame(FINAL, b""),
        frame(FINAL | BINARY, &pattern(130)),
        frame(FINAL | CLOSE, &[0x03, 0xe8]),
    ]
    .concat();
    let expected = [
        frame(FINAL | BINARY, b"one"),
        frame(FINAL | PING, b"alive"),
        frame(FINAL | BINARY, b"two"),
        frame(FINAL | PONG, b""),
        frame(FINAL | BINARY, b""),
        frame(FINAL | BINARY, &pattern(130)),
        frame(FINAL | CLOSE, &[0x03, 0xe8]),
    ]
    .concat();
    for most in 1..wire.len() {
        for room in [1, 2, 3, 5, 14, 1000] {
            let got = passed(Drip::new(&wire, most, (most * room) as u64), room).await;
            assert!(got == expected, "{most} bytes at a time, read by {room}");
        }
    }
    // An end in the midst of a header is an end.
    for length in 0..wire.len() {
        let got = passed(Drip::new(&wire[..length], 1000, length as u64), 1000).await;
        assert!(expected.starts_with(&got), "{length} bytes of it");
    }
}

#[test]
fn treatment_of_a_frame_depends_on_the_open_message() {
    let (binary, empty) = (Some(Open { text: false, empty: false }), Some(Open { text: false, empty: true }));
    let text = Some(Open { text: true, empty: false });
    for (before, first, length, expected, after) in [
        (None, FINAL | BINARY, 5, Treatment::Messages, None),
        (None, FINAL | BINARY, 0, Treatment::Messages, None),
        (None, FINAL | BINARY, u64::MAX >> 1, Treatment::Messages, None),
        (None, BINARY, 5, Treatment::Messages, binary),
        (None, BINARY, 0, Treatment::Gone, empty),
        (binary, CONTINUATION, 5, Treatment::Messages, binary),
        (binary, CONTINUATION, 0, Treatment::Gone, binary),
        (binary, FINAL, 5, Treatment::Messages, None),
        (binary, FINAL, 0, Treatment::Gone, None),
        (empty, CONTINUATION, 5, Treatment::Messages, binary),
        (empty, CONTINUATION, 0, Treatment::Gone, empty),
        (empty, FINAL, 0, Treatment::Messages, None),
        (None, FINAL | TEXT, 5, Treatment::Pongs, None),
        (None, TEXT, 5, Treatment::Pongs, text),
        (text, FINAL, 0, Treatment::Pongs, None),
        (None, FINAL | PING, 125, Treatment::Same, None),
        (binary, FINAL | PONG, 0, Treatment::Same, binary),
        (text, FINAL | CLOSE, 2, Treatment::Same, text),
        // Frames that the library refuses.
        (None, FINAL, 5, Treatment::Untouched, None),
        (None, FINAL | 3, 5, Treatment::Untouched, None),
        (None, FINAL | 11, 5, Treatment::Untouched, None),
        (None, FINAL | PING, 126, Treatment::Untouched, None),
        (None, PING, 5, Treatment::Untouched, None),
        (None, FINAL | BINARY | 0x40, 5, Treatment::Untouched, None),
        (binary, FINAL | 0x10, 5, Treatment::Untouched, binary),
        (None, FINAL | BINARY, 1 << 63, Treatment::Untouched, None),
    ] {
        let mut open = before;
        let header = Header { first, length, mask: Some(MASK) };
        assert_eq!(treatment(&mut open, &header).unwrap(), expected, "{first:#x} {length} {before:?}");
        assert_eq!(open, after, "{first:#x} {length} {before:?}");
    }
    for first in [BINARY, FINAL | BINARY, FINAL | TEXT] {
        assert!(treatment(&mut empty.clone(), &Header { first, length: 1, mask: None }).is_err());
    }
}

#[test]
fn headers_are_read_and_written() {
    for (length, size) in [
        (0, 2),
        (1, 2),
        (125, 2),
        (126, 4),
        (255, 4),
        (256, 4),
        (65_535, 4),
        (65_536, 10),
        (1 << 40, 10),
        (u64::MAX, 10),
    ] {
        for mask in [None, Some(MASK)] {
            let header = Header { first: FINAL | BINARY, length, mask };
            let part = header.bytes();
            let bytes = part.bytes();
            assert_eq!(bytes.len(), size + if mask.is_some() { 4 } else { 0 });
            assert_eq!(Header::parse(bytes), Ok(header));
            for missing in 0..bytes.len() {
                let wanted = if missing < 2 { 2 } else { bytes.len() };
                assert_eq!(Header::parse(&bytes[..missing]), Err(wanted));
            }
        }
    }
    // Not the shortest form, but understood.
    assert_eq!(Header::parse(&[0x82, 126, 0, 5]), Ok(Header { first: 0x82, length: 5, mask: None }));
}

#[tokio::test]
async fn library_refuses_invalid_frames() {
    let good = frame(FINAL | BINARY, b"good");
    let unmasked = |first: u8| [&[first, 4][..], b"good"].concat();
    let endless = [&[FINAL | BINARY, MASKED | 127, 0x80, 0, 0, 0, 0, 0, 0, 4][..], &MASK].concat();
    for (bad, refusal) in [
        (frame(FINAL | BINARY | 0x20, b"bits"), "reserved bits"),
        (frame(FINAL | 3, b"kind"), "invalid opcode"),
        (frame(FINAL | PING, &pattern(126)), "control frame too big"),
        (frame(PING, b"part"), "fragmented control frame"),
        (frame(FINAL, b"more"), "continue frame"),
        (unmasked(FINAL | BINARY), "unmasked frame"),
        (unmasked(FINAL | PING), "unmasked frame"),
        (unmasked(FINAL | TEXT), "unmasked frame"),
        (endless, "too long"),
        ([frame(BINARY, b"good"), good.clone()].concat(), "within another"),
        ([frame(TEXT, b"good"), frame(FINAL | TEXT, b"text")].concat(), "within another"),
    ] {
        let wire = [&good[..], &bad, &good].concat();
        let (messages, error) = received(Drip::new(&wire, 50, 3), Content::Bytes).await;
        assert!(error.to_string().to_lowercase().contains(refusal), "{error}, not {refusal}");
        let found = messages.iter().filter(|message| message.is_binary()).collect::<Vec<_>>();
        let good = Message::Binary(Bytes::from_static(b"good"));
        assert!(found.len() <= 2 && found.iter().all(|message| **message == good), "{messages:?}");
    }
}

#[tokio::test]
async fn error_follows_the_bytes_before_it_once() {
    for most in 1..40 {
        let wire = frame(FINAL | BINARY, b"last words");
        let mut frames = Frames::new(Drip { breaks: true, ..Drip::new(&wire, most, 9) }, Content::Bytes);
        let mut got = Vec::new();
        let error = frames.read_to_end(&mut got).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(got, wire);
        assert_eq!(frames.read(&mut [0; 8]).await.unwrap(), 0);
    }
}

#[tokio::test]
async fn datagrams_stay_whole() {
    let wire = [
        frame(BINARY, &pattern(10_000)),
        frame(FINAL | PING, b"alive"),
        frame(FINAL, &pattern(10_000)),
        frame(FINAL | BINARY, b""),
        frame(FINAL | BINARY, &pattern(65_507)),
    ]
    .concat();
    let (messages, _) = received(Drip::new(&wire, 5000, 4), Content::Datagrams).await;
    let sizes = messages.iter().filter(|message| message.is_binary()).map(Message::len).collect::<Vec<_>>();
    assert_eq!(sizes, [20_000, 0, 65_507]);
}

type Socket = WebSocketStream<DuplexStream>;

/// A client and an agent with a copy between them.
async fn copied() -> (Socket, Socket, tokio::task::JoinHandle<End>) {
    let config = Some(websocket::config());
    let ((client, from_client), (to_agent, agent)) = (duplex(64 << 10), duplex(64 << 10));
    let client = WebSocketStream::from_raw_socket(client, Role::Client, None).await;
    let from_client = Frames::new(from_client, Content::Bytes);
    let from_client = WebSocketStream::from_raw_socket(from_client, Role::Server, config).await;
    let to_agent = WebSocketStream::from_raw_socket(to_agent, Role::Client, config).await;
    // With the limit of the agent's server.
    let agent = WebSocketStream::from_raw_socket(agent, Role::Server, config).await;
    let copy = tokio::spawn(relay::copy(from_client, to_agent, Limits::default(), CancellationToken::new()));
    (client, agent, copy)
}

#[tokio::test]
async fn large_messages_and_many_fragments_reach_virt_handler() {
    let (mut client, mut agent, copy) = copied().await;
    let large = pattern(3 << 20);
    let fragment = pattern(10_240);
    let mut expected = large.clone();
    expected.extend(fragment.repeat(300));
    let sender = tokio::spawn(async move {
        client.send(Message::Binary(large.into())).await.unwrap();
        for number in 0..300 {
            let opcode = OpCode::Data(if number == 0 { Data::Binary } else { Data::Continue });
            let frame = Frame::message(fragment.clone(), opcode, number == 299);
            client.send(Message::Frame(frame)).await.unwrap();
            if number % 100 == 50 {
                client.send(Message::Ping(Bytes::from_static(b"alive"))).await.unwrap();
            }
        }
        client.send(Message::Text("x".repeat(1 << 20).into())).await.unwrap();
        client.close(None).await.unwrap();
        while client.next().await.is_some() {}
    });
    let mut received = Vec::new();
    let closed = async {
        loop {
            match agent.next().await {
                Some(Ok(Message::Binary(data))) => {
                    assert!(!data.is_empty() && data.len() <= PIECE);
                    received.extend_from_slice(&data);
                }
                Some(Ok(Message::Close(_))) => return,
                Some(Ok(_)) => {}
                other => panic!("{other:?}"),
            }
        }
    };
    timeout(Duration::from_secs(60), closed).await.unwrap();
    assert!(received == expected, "{} of {} bytes", received.len(), expected.len());
    assert!(agent.next().await.is_none());
    sender.await.unwrap();
    assert_eq!(copy.await.unwrap(), End::ClientClosed);
}
