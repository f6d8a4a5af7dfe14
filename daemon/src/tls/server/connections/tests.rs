use super::*;

const LIMITS: Limits = Limits { connections: 8, others: 4, share: 3, silent: 2, probes: 1, ..Limits::DEFAULT };
const OTHER: fn(u8) -> Sender = |number| sender(number, false, false);
const TRUSTED: fn(u8) -> Sender = |number| sender(number, true, false);
const PROBE: fn(u8) -> Sender = |number| sender(number, false, true);

const fn sender(number: u8, trusted: bool, probes: bool) -> Sender {
    Sender { address: IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, number)), trusted, probes }
}

/// An event at a server, a tenth of a second after the one before.
enum Step {
    /// Opens a connection of this name; those of these names give way.
    Open(&'static str, Sender, &'static [&'static str]),
    /// A connection is refused.
    Refused(Sender),
    /// The head of a request comes.
    Asks(&'static str),
    /// The request is answered; the address has a proof or not.
    Answered(&'static str, bool),
    Closed(&'static str),
    /// The connection is kept.
    Kept(&'static str),
    /// Seconds that pass.
    Pass(u64),
}

use Step::{Answered, Asks, Closed, Kept, Open, Pass, Refused};

fn play(name: &str, steps: &[Step]) {
    let mut table = ConnectionTable::new(LIMITS);
    let mut ids = HashMap::new();
    let mut now = Instant::now();
    for (index, step) in steps.iter().enumerate() {
        now += Duration::from_millis(100);
        let step_name = format!("{name}, step {index}");
        match step {
            Open(connection, sender, gave_way) => {
                let opened =
                    table.open(*sender, *connection, now).unwrap_or_else(|Full| panic!("{step_name}: refused"));
                assert_eq!(opened.gave_way, *gave_way, "{step_name}");
                ids.insert(*connection, opened.id);
            }
            Refused(sender) => assert!(table.open(*sender, "refused", now).is_err(), "{step_name}: let in"),
            Asks(connection) => table.requested(ids[connection], now),
            Answered(connection, trusted) => table.answered(ids[connection], *trusted, now),
            Closed(connection) => assert!(table.close(ids[connection]).is_some(), "{step_name}: it is gone"),
            Kept(connection) => table.keep(ids[connection]),
            Pass(seconds) => now += Duration::from_secs(*seconds),
        }
    }
    for id in ids.values() {
        table.close(*id);
    }
    assert!(table.connections.is_empty() && table.addresses.is_empty(), "{name}");
    assert_eq!((table.reserved, table.kept), (0, 0), "{name}");
}

#[test]
fn connections_give_way_by_their_state_and_the_connections_of_their_address() {
    play(
        "the oldest silent one of the address that holds most",
        &[
            Open("a1", OTHER(1), &[]),
            Open("b1", OTHER(2), &[]),
            Open("b2", OTHER(2), &["a1"]),
            Open("c1", OTHER(3), &["b1"]),
            Open("c2", OTHER(3), &["b2"]),
            Open("d1", OTHER(4), &["c1"]),
        ],
    );
    play(
        "a connection with a request is not silent",
        &[
            Open("a1", OTHER(1), &[]),
            Asks("a1"),
            Open("a2", OTHER(1), &[]),
            Open("b1", OTHER(2), &[]),
            Open("c1", OTHER(3), &["a2"]),
        ],
    );
    play(
        "a share, of which idle ones give way and requests under way do not",
        &[
            Open("a1", OTHER(1), &[]),
            Asks("a1"),
            Open("a2", OTHER(1), &[]),
            Asks("a2"),
            Answered("a2", false),
            Open("a3", OTHER(1), &[]),
            Asks("a3"),
            Open("a4", OTHER(1), &["a2"]),
            Asks("a4"),
            Closed("a1"),
            Open("a5", OTHER(1), &[]),
            Asks("a5"),
            Refused(OTHER(1)),
            Open("b1", OTHER(2), &[]),
            Pass(5),
            Open("a6", OTHER(1), &["a3"]),
        ],
    );
    play(
        "requests under way give way to an address that holds less",
        &[
            Open("a1", OTHER(1), &[]),
            Asks("a1"),
            Open("a2", OTHER(1), &[]),
            Asks("a2"),
            Open("a3", OTHER(1), &[]),
            Asks("a3"),
            Open("b1", OTHER(2), &[]),
            Asks("b1"),
            Open("c1", OTHER(3), &["a1"]),
            Asks("c1"),
            Open("d1", OTHER(4), &["a2"]),
            Asks("d1"),
            Refused(OTHER(5)),
        ],
    );
    play(
        "others have half, and give way to the trusted",
        &[
            Open("t1", TRUSTED(9), &[]),
            Open("t2", TRUSTED(9), &[]),
            Open("t3", TRUSTED(9), &[]),
            Open("t4", TRUSTED(9), &[]),
            Open("t5", TRUSTED(9), &[]),
            Open("a1", OTHER(1), &[]),
            Asks("a1"),
            Open("b1", OTHER(2), &[]),
            Asks("b1"),
            Open("c1", OTHER(3), &[]),
            Open("t6", TRUSTED(9), &["c1"]),
            Open("t7", TRUSTED(9), &["a1"]),
            Refused(OTHER(4)),
            Open("t8", TRUSTED(9), &["b1"]),
            Open("t9", TRUSTED(9), &["t1"]),
            Refused(OTHER(4)),
        ],
    );
    play(
        "the trusted among themselves: silent, idle, never a request under way",
        &[
            Open("1", TRUSTED(8), &[]),
            Asks("1"),
            Answered("1", true),
            Open("2", TRUSTED(8), &[]),
            Asks("2"),
            Open("3", TRUSTED(9), &[]),
            Asks("3"),
            Open("4", TRUSTED(9), &[]),
            Asks("4"),
            Open("5", TRUSTED(9), &[]),
            Asks("5"),
            Open("6", TRUSTED(9), &[]),
            Asks("6"),
            Open("7", TRUSTED(9), &[]),
            Asks("7"),
            Open("8", TRUSTED(9), &[]),
            Asks("8"),
            Open("9", TRUSTED(9), &["1"]),
            Asks("9"),
            Pass(60),
            Refused(TRUSTED(9)),
        ],
    );
    play(
        "an address is trusted from its proof on",
        &[
            Open("a1", OTHER(1), &[]),
            Asks("a1"),
            Open("a2", OTHER(1), &[]),
            Answered("a1", true),
            Open("b1", OTHER(2), &[]),
            Open("c1", OTHER(3), &[]),
            Open("d1", OTHER(4), &["b1"]),
            Open("a3", TRUSTED(1), &[]),
            Open("a4", TRUSTED(1), &[]),
        ],
    );
}

#[test]
fn slots_for_probes_are_left_to_probes() {
    play(
        "slots for probes count for nothing else",
        &[
            Open("p1", PROBE(7), &[]),
            Asks("p1"),
            Open("a1", OTHER(1), &[]),
            Open("a2", OTHER(1), &[]),
            Open("a3", OTHER(1), &["a1"]),
            Closed("p1"),
            Open("p2", PROBE(7), &[]),
        ],
    );
    play(
        "beyond them, probe addresses are like others",
        &[
            Open("p1", PROBE(7), &[]),
            Open("p2", PROBE(7), &[]),
            Open("a1", OTHER(1), &[]),
            Open("p3", PROBE(7), &["p2"]),
        ],
    );
    play(
        "when all others are taken, the oldest of them gives way",
        &[
            Open("p1", PROBE(7), &[]),
            Open("a1", OTHER(1), &[]),
            Asks("a1"),
            Open("b1", OTHER(2), &[]),
            Asks("b1"),
            Open("c1", OTHER(3), &[]),
            Asks("c1"),
            Open("d1", OTHER(4), &[]),
            Asks("d1"),
            Open("p2", PROBE(7), &["p1"]),
            Asks("p2"),
            Refused(PROBE(7)),
            Pass(60),
            Asks("a1"),
            Asks("b1"),
            Asks("c1"),
            Asks("d1"),
            Open("p3", PROBE(7), &["p2"]),
        ],
    );
}

#[test]
fn trusted_probe_address_keeps_the_slots_for_probes_until_all_others_are_busy() {
    const BOTH: Sender = sender(7, true, true);
    let mut table = ConnectionTable::new(LIMITS);
    let now = Instant::now();
    for number in 0..LIMITS.connections {
        let opened = table.open(BOTH, number, now).unwrap();
        assert!(!opened.reserved, "{number}");
        table.requested(opened.id, now);
    }
    assert!(table.open(BOTH, 8, now).unwrap().reserved);
    let opened = table.open(BOTH, 9, now).unwrap();
    assert!(opened.reserved);
    assert_eq!(opened.gave_way, [8]);
}

#[test]
fn flood_of_one_address_costs_no_other_its_connection() {
    let mut table = ConnectionTable::new(Limits { silent: 64, ..Limits::DEFAULT });
    let now = Instant::now();
    let kept = table.open(OTHER(1), 0, now).unwrap();
    for number in 1..10_000 {
        table.open(OTHER(2), number, now + Duration::from_micros(number)).unwrap();
        assert!(table.connections.len() <= 64, "{}", table.connections.len());
    }
    assert_eq!(table.close(kept.id), Some(0));
}

#[test]
fn kept_connections_give_way_to_none_and_count_for_no_address() {
    play(
        "an address whose proof has ended",
        &[
            Open("a", TRUSTED(1), &[]),
            Kept("a"),
            Open("b", TRUSTED(1), &[]),
            Kept("b"),
            Open("c", PROBE(1), &[]),
            Kept("c"),
            Pass(3600),
            Open("d", OTHER(1), &[]),
            Open("e", OTHER(1), &[]),
            Open("f", OTHER(1), &["d"]),
            Open("g", PROBE(2), &[]),
        ],
    );
    play(
        "all connections are kept",
        &[
            Open("a", TRUSTED(1), &[]),
            Kept("a"),
            Open("b", TRUSTED(1), &[]),
            Kept("b"),
            Open("c", TRUSTED(1), &[]),
            Kept("c"),
            Open("d", TRUSTED(2), &[]),
            Kept("d"),
            Open("e", TRUSTED(2), &[]),
            Kept("e"),
            Open("f", TRUSTED(2), &[]),
            Kept("f"),
            Open("g", TRUSTED(2), &[]),
            Kept("g"),
            Open("h", OTHER(3), &[]),
            Open("i", TRUSTED(3), &["h"]),
            Kept("i"),
            Refused(OTHER(4)),
            Refused(TRUSTED(1)),
            Closed("a"),
            Open("j", TRUSTED(5), &[]),
        ],
    );
}
