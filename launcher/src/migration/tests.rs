//! The channels between two pods.

use std::time::Duration;

use protocol::channels::{CONNECTED, Channel};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    time::timeout,
};

use super::*;

/// A pod with its files, removed at the end.
struct TestPod {
    paths: Paths,
    channels: Channels,
}

impl Drop for TestPod {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.paths.private);
    }
}

impl TestPod {
    fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("launcher-channels-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        std::fs::create_dir_all(root.join("u")).unwrap();
        std::fs::create_dir_all(root.join("libvirt")).unwrap();
        let container_disks = root.join("disks");
        let paths =
            Paths { private: root.clone(), sockets: root.clone(), runtime: root, container_disks, ..Paths::default() };
        let channels = Channels::new(paths.clone());
        Self { paths, channels }
    }

    /// A waiting connection of virt-handler.
    async fn waiting(&self) -> UnixStream {
        let (mine, its) = UnixStream::pair().unwrap();
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        self.channels.inner.waiting.push(its, permit);
        mine
    }
}

async fn read_byte(stream: &mut UnixStream) -> std::io::Result<u8> {
    timeout(Duration::from_secs(5), stream.read_u8()).await.unwrap()
}

#[tokio::test]
async fn a_connection_of_libvirt_takes_one_of_virt_handler() {
    let pod = TestPod::new("source");
    pod.channels.open(ChannelMode::Source).unwrap();
    // One that virt-handler has closed is not taken.
    drop(pod.waiting().await);
    for channel in SOCKETS {
        let mut libvirt = UnixStream::connect(pod.channels.socket(channel)).await.unwrap();
        let mut handler = pod.waiting().await;
        assert_eq!(read_byte(&mut handler).await.unwrap(), channel.byte());
        libvirt.write_all(b"x").await.unwrap();
        assert_eq!(read_byte(&mut handler).await.unwrap(), b'x');
        handler.write_all(b"y").await.unwrap();
        assert_eq!(read_byte(&mut libvirt).await.unwrap(), b'y');
        drop(libvirt);
        assert!(read_byte(&mut handler).await.is_err());
    }
    let mut libvirt = UnixStream::connect(pod.channels.socket(Channel::Control)).await.unwrap();
    let mut handler = pod.waiting().await;
    read_byte(&mut handler).await.unwrap();
    // The end of the migration ends its connections and sockets.
    pod.channels.open(ChannelMode::Closed).unwrap();
    assert!(read_byte(&mut libvirt).await.is_err() && read_byte(&mut handler).await.is_err());
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(UnixStream::connect(pod.channels.socket(Channel::Control)).await.is_err());
}

#[tokio::test]
async fn the_control_connection_waits_for_libvirts_daemon() {
    let pod = TestPod::new("target");
    // Of an earlier migration.
    drop(UnixListener::bind(pod.channels.socket(Channel::Memory)).unwrap());
    pod.channels.open(ChannelMode::Target).unwrap();
    assert!(!pod.channels.socket(Channel::Memory).exists());
    let (mut handler, its) = UnixStream::pair().unwrap();
    let channels = pod.channels.clone();
    tokio::spawn(async move { target::connect(&channels, its).await });
    tokio::time::sleep(Duration::from_millis(120)).await;
    let daemon = UnixListener::bind(pod.paths.libvirt_socket()).unwrap();
    assert_eq!(read_byte(&mut handler).await.unwrap(), CONNECTED);
    let mut daemon = daemon.accept().await.unwrap().0;
    handler.write_all(b"x").await.unwrap();
    assert_eq!(read_byte(&mut daemon).await.unwrap(), b'x');
}

#[tokio::test]
async fn megabytes_pass_unchanged_while_the_reader_pauses() {
    let (mut near, one) = UnixStream::pair().unwrap();
    let (other, mut far) = UnixStream::pair().unwrap();
    let relayed = tokio::spawn(relay::relay(one, other));
    let sent: Vec<u8> = (0..5_000_003_u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let length = sent.len();
    let (writer, expected) = (sent.clone(), sent);
    let write = tokio::spawn(async move {
        near.write_all(&writer).await.unwrap();
        near.shutdown().await.unwrap();
        // The other direction is open after the end of this one.
        read_byte(&mut near).await
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!write.is_finished(), "all bytes are taken without a reader");
    let mut arrived = Vec::new();
    timeout(Duration::from_secs(20), far.read_to_end(&mut arrived)).await.unwrap().unwrap();
    assert!(arrived == expected, "{} bytes", arrived.len());
    far.write_u8(b'y').await.unwrap();
    assert_eq!(write.await.unwrap().unwrap(), b'y');
    drop(far);
    assert_eq!(timeout(Duration::from_secs(5), relayed).await.unwrap().unwrap().unwrap(), (length as u64, 1));
}

#[tokio::test]
async fn a_release_has_three_results() {
    let pod = TestPod::new("release");
    pod.channels.open(ChannelMode::Source).unwrap();
    for (paused, thaw_after, sent, answer, expected, follows) in [
        (false, None, b'r', Some(b'k'), Some(true), None),
        (true, None, b'p', Some(b'k'), Some(true), None),
        (false, Some(7), b'r', Some(b'k'), Some(true), Some(7)),
        (false, Some(7), b'r', Some(b'n'), Some(false), None),
        (false, None, b'r', Some(b'?'), None, None),
        (false, None, b'r', None, None, None),
    ] {
        let mut handler = pod.waiting().await;
        let channels = pod.channels.clone();
        let release = tokio::spawn(async move { channels.release(paused, thaw_after).await });
        assert_eq!(read_byte(&mut handler).await.unwrap(), Channel::Release.byte());
        assert_eq!(read_byte(&mut handler).await.unwrap(), sent);
        if let Some(answer) = answer {
            handler.write_all(&[answer]).await.unwrap();
            assert_eq!(handler.read_u32().await.ok(), follows, "{answer}");
        }
        drop(handler);
        assert_eq!(release.await.unwrap().ok(), expected, "{answer:?}");
    }
}

/// An engine whose guest has arrived.
#[derive(Clone)]
struct Arrived(Channels, std::sync::Arc<std::sync::Mutex<Option<u32>>>);

impl Engine for Arrived {
    fn channels(&self) -> &Channels {
        &self.0
    }

    async fn release(&self, _: bool) -> Result<bool> {
        Ok(true)
    }

    fn thaw_after(&self, seconds: u32) {
        *self.1.lock().unwrap() = Some(seconds);
    }
}

#[tokio::test]
async fn the_time_of_the_thaw_follows_the_answer_to_a_release() {
    let pod = TestPod::new("thaw");
    // A launcher of an older release sends none.
    for sent in [None, Some(7)] {
        let engine = Arrived(pod.channels.clone(), std::sync::Arc::default());
        let (mut handler, its) = UnixStream::pair().unwrap();
        let taken = engine.clone();
        let released = tokio::spawn(async move { target::release(its, &taken).await });
        handler.write_all(b"r").await.unwrap();
        assert_eq!(read_byte(&mut handler).await.unwrap(), CONNECTED);
        assert_eq!(read_byte(&mut handler).await.unwrap(), b'k');
        if let Some(seconds) = sent {
            handler.write_u32(seconds).await.unwrap();
        }
        drop(handler);
        released.await.unwrap().unwrap();
        assert_eq!(*engine.1.lock().unwrap(), sent);
    }
}

/// Writes the image of a container disk.
fn write_image(pod: &TestPod, content: &str) -> BaseImage {
    let directory = pod.paths.container_disk("root");
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::write(directory.join("disk.img"), content).unwrap();
    BaseImage { volume: "root".into(), path: "disk.img".into() }
}

#[tokio::test]
async fn images_are_compared_through_the_channel_of_the_release() {
    let source = TestPod::new("images-source");
    source.channels.open(ChannelMode::Source).unwrap();
    let image = write_image(&source, "one");
    for (content, expected) in [
        ("one", Ok(())),
        ("two", Err(r#"the image of volume "root" on the target node differs from that on the source node"#)),
    ] {
        let target = TestPod::new("images-target");
        target.channels.open(ChannelMode::Target).unwrap();
        target.channels.read_images(&[write_image(&target, content)]);
        let (mut handler, its) = UnixStream::pair().unwrap();
        let engine = Arrived(target.channels.clone(), std::sync::Arc::default());
        let answered = tokio::spawn(async move { target::release(its, &engine).await });
        assert_eq!(read_byte(&mut handler).await.unwrap(), CONNECTED);
        let mut waiting = source.waiting().await;
        let (channels, images) = (source.channels.clone(), vec![image.clone()]);
        let compared = tokio::spawn(async move { channels.compare_images(&images).await });
        assert_eq!(read_byte(&mut waiting).await.unwrap(), Channel::Release.byte());
        tokio::spawn(relay::relay(waiting, handler));
        let compared = timeout(Duration::from_secs(10), compared).await.unwrap().unwrap();
        assert_eq!(compared, expected.map_err(str::to_owned));
        answered.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn only_a_target_that_never_answers_is_not_compared() {
    let source = TestPod::new("images-older");
    source.channels.open(ChannelMode::Source).unwrap();
    let image = write_image(&source, "one");
    // Bytes of the target in each attempt, before it closes the connection.
    for (attempts, passes) in
        [([""; 4], true), (["i", "", "", ""], false), (["", "", "", "i."], false), (["", "x", "", ""], false)]
    {
        let (channels, images) = (source.channels.clone(), vec![image.clone()]);
        let compared = tokio::spawn(async move { channels.compare_images(&images).await });
        for answer in attempts {
            let mut handler = source.waiting().await;
            assert_eq!(read_byte(&mut handler).await.unwrap(), Channel::Release.byte());
            assert_eq!(read_byte(&mut handler).await.unwrap(), b'i');
            handler.write_all(answer.as_bytes()).await.unwrap();
        }
        assert_eq!(compared.await.unwrap().is_ok(), passes, "{attempts:?}");
    }
}
