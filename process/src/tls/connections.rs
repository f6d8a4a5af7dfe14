//! The connections of one server, and which of them give way to a new one. Pure: the clock is an argument.
//!
//! ```text
//!  open ──▶ silent ── head of a request ──▶ busy ◀── head ── idle
//!             │                               └── answer ────▶ ▲
//!             └ handshake or first head is under way
//! ```
//!
//! A new connection is refused only when nothing gives way to it. Of addresses that have proven nothing, the one that holds
//! most loses its oldest connection: first a silent one, then an idle one. A request under way is ended only for an address
//! that holds less, or when it has been under way for [`STALLED`]. So one address cannot shut out another, and connections
//! that say nothing shut out nobody.
//!
//! | connections of | at a time |
//! |---|---|
//! | probe addresses | the first `probes` ones have places that no other address takes |
//! | addresses without a proof, silent | `silent` |
//! | one address without a proof | `share` |
//! | all addresses without a proof | `others` |
//! | all | `connections`; those without a proof give way to those with one |

use std::{
    cmp::Reverse,
    collections::HashMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use super::Limits;

/// A request that has been under way for so long gives way to a new connection of the same address. Every answer to a
/// client without credentials takes less.
const STALLED: Duration = Duration::from_secs(5);

/// The other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sender {
    pub(super) address: IpAddr,
    /// The address has proven to be an API server, or what else the server knows by a certificate.
    pub(super) trusted: bool,
    /// kubelet's probes come from this address.
    pub(super) probes: bool,
}

/// A connection that has been let in.
#[derive(Debug)]
pub(super) struct Opened<T> {
    /// Its name in the table.
    pub(super) id: u64,
    /// Its place is one of those for probes.
    pub(super) reserved: bool,
    /// Those that gave way to it.
    pub(super) gave_way: Vec<T>,
}

/// All places are taken, and nothing gives way.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Full;

/// The connections that are open. `T` is the means to end one.
pub(super) struct ConnectionTable<T> {
    limits: Limits,
    next: u64,
    connections: HashMap<u64, Connection<T>>,
    /// Connections by address, without those on places for probes.
    addresses: HashMap<IpAddr, Held>,
    /// Connections on places for probes.
    reserved: usize,
}

struct Connection<T> {
    address: IpAddr,
    reserved: bool,
    state: State,
    since: Instant,
    end: T,
}

/// Activity of a connection, in the order of giving way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Silent,
    Idle,
    Busy,
}

#[derive(Default)]
struct Held {
    trusted: bool,
    connections: usize,
    silent: usize,
}

/// Limit that a new connection would exceed.
#[derive(Clone, Copy, Debug)]
enum Exceeded {
    Share,
    Silent,
    Others,
    All,
}

impl<T> ConnectionTable<T> {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, next: 0, connections: HashMap::new(), addresses: HashMap::new(), reserved: 0 }
    }

    /// Lets a new connection in, and takes those out that give way to it.
    pub(super) fn open(&mut self, sender: Sender, end: T, now: Instant) -> Result<Opened<T>, Full> {
        if let Some(held) = self.addresses.get_mut(&sender.address) {
            held.trusted = sender.trusted;
        }
        let mut gave_way = Vec::new();
        let reserve = sender.probes && self.reserved < self.limits.probes;
        // An API server on the node of the pod has the address of kubelet, and needs more than the few places for probes.
        let mut reserved = reserve && !sender.trusted;
        while !reserved && let Some(exceeded) = self.exceeded(sender) {
            let victim = match self.gives_way(exceeded, sender, now) {
                Some(victim) => Some(victim),
                None if sender.probes => {
                    reserved = true;
                    if reserve { None } else { Some(self.reserved_gives_way(now).ok_or(Full)?) }
                }
                None => return Err(Full),
            };
            gave_way.extend(victim.and_then(|victim| self.close(victim)));
        }
        let id = self.next;
        self.next += 1;
        let address = sender.address;
        self.connections.insert(id, Connection { address, reserved, state: State::Silent, since: now, end });
        if reserved {
            self.reserved += 1;
        } else {
            let held = self.addresses.entry(address).or_default();
            held.trusted = sender.trusted;
            held.connections += 1;
            held.silent += 1;
        }
        Ok(Opened { id, reserved, gave_way })
    }

    /// Records that the head of a request has come.
    pub(super) fn asked(&mut self, id: u64, now: Instant) {
        self.put(id, State::Busy, now);
    }

    /// Records that a request is answered, and whether the address has a proof by now.
    pub(super) fn answered(&mut self, id: u64, trusted: bool, now: Instant) {
        let address = self.put(id, State::Idle, now);
        if let Some(held) = address.and_then(|address| self.addresses.get_mut(&address)) {
            held.trusted = trusted;
        }
    }

    /// Takes a connection out that has ended or gives way.
    pub(super) fn close(&mut self, id: u64) -> Option<T> {
        let connection = self.connections.remove(&id)?;
        if connection.reserved {
            self.reserved -= 1;
        } else if let Some(held) = self.addresses.get_mut(&connection.address) {
            held.connections -= 1;
            held.silent -= usize::from(connection.state == State::Silent);
            if held.connections == 0 {
                self.addresses.remove(&connection.address);
            }
        }
        Some(connection.end)
    }

    fn put(&mut self, id: u64, state: State, now: Instant) -> Option<IpAddr> {
        let connection = self.connections.get_mut(&id)?;
        if connection.state == State::Silent
            && !connection.reserved
            && let Some(held) = self.addresses.get_mut(&connection.address)
        {
            held.silent -= 1;
        }
        connection.state = state;
        connection.since = now;
        Some(connection.address)
    }

    fn exceeded(&self, sender: Sender) -> Option<Exceeded> {
        let (mut all, mut others, mut silent) = (0, 0, 0);
        for held in self.addresses.values() {
            all += held.connections;
            if !held.trusted {
                others += held.connections;
                silent += held.silent;
            }
        }
        let limits = &self.limits;
        if sender.trusted {
            return (all >= limits.connections).then_some(Exceeded::All);
        }
        if self.held(sender.address) >= limits.share {
            Some(Exceeded::Share)
        } else if silent >= limits.silent {
            Some(Exceeded::Silent)
        } else if others >= limits.others || all >= limits.connections {
            Some(Exceeded::Others)
        } else {
            None
        }
    }

    /// The connection that gives way to a new one of `sender`.
    fn gives_way(&self, exceeded: Exceeded, sender: Sender, now: Instant) -> Option<u64> {
        let own = self.held(sender.address);
        let ends = |connection: &Connection<T>| connection.state != State::Busy || stalled(connection, now);
        match exceeded {
            Exceeded::Share => self.first(|connection, _| {
                (connection.address == sender.address && ends(connection))
                    .then_some((connection.state, connection.since))
            }),
            Exceeded::Silent => self.first(|connection, held| {
                (connection.state == State::Silent && !held.trusted).then_some((Reverse(held.silent), connection.since))
            }),
            Exceeded::Others => self.first(|connection, held| {
                (!held.trusted && (ends(connection) || held.connections > own + 1)).then_some((
                    Reverse(held.connections),
                    connection.state,
                    connection.since,
                ))
            }),
            Exceeded::All => self.first(|connection, held| {
                (!held.trusted || connection.state != State::Busy).then_some((
                    held.trusted,
                    Reverse(held.connections),
                    connection.state,
                    connection.since,
                ))
            }),
        }
    }

    /// The connection on a place for probes that gives way to a new one.
    fn reserved_gives_way(&self, now: Instant) -> Option<u64> {
        let reserved = self.connections.iter().filter(|(_, connection)| connection.reserved);
        let ends = reserved.filter(|(_, connection)| connection.state != State::Busy || stalled(connection, now));
        ends.min_by_key(|(id, connection)| (connection.state, connection.since, **id)).map(|(id, _)| *id)
    }

    /// The connection with the least key, of two the one that came first; those without a key stay.
    fn first<K: Ord>(&self, key: impl Fn(&Connection<T>, &Held) -> Option<K>) -> Option<u64> {
        let ordinary = self.connections.iter().filter(|(_, connection)| !connection.reserved);
        let keys = ordinary.filter_map(|(id, connection)| {
            let key = key(connection, self.addresses.get(&connection.address)?)?;
            Some((key, *id))
        });
        keys.min().map(|(_, id)| id)
    }

    fn held(&self, address: IpAddr) -> usize {
        self.addresses.get(&address).map_or(0, |held| held.connections)
    }
}

fn stalled<T>(connection: &Connection<T>, now: Instant) -> bool {
    now.duration_since(connection.since) >= STALLED
}

#[cfg(test)]
mod tests {
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
        /// A connection of this name is opened; those of these names give way.
        Open(&'static str, Sender, &'static [&'static str]),
        /// A connection is refused.
        Refused(Sender),
        /// The head of a request comes.
        Asks(&'static str),
        /// The request is answered; the address has a proof or not.
        Answered(&'static str, bool),
        Closed(&'static str),
        /// Seconds that pass.
        Pass(u64),
    }

    use Step::{Answered, Asks, Closed, Open, Pass, Refused};

    fn play(name: &str, steps: &[Step]) {
        let mut table = ConnectionTable::new(LIMITS);
        let mut ids = HashMap::new();
        let mut now = Instant::now();
        for (index, step) in steps.iter().enumerate() {
            now += Duration::from_millis(100);
            let place = format!("{name}, step {index}");
            match step {
                Open(connection, sender, gave_way) => {
                    let opened =
                        table.open(*sender, *connection, now).unwrap_or_else(|Full| panic!("{place}: refused"));
                    assert_eq!(opened.gave_way, *gave_way, "{place}");
                    ids.insert(*connection, opened.id);
                }
                Refused(sender) => assert!(table.open(*sender, "refused", now).is_err(), "{place}: let in"),
                Asks(connection) => table.asked(ids[connection], now),
                Answered(connection, trusted) => table.answered(ids[connection], *trusted, now),
                Closed(connection) => assert!(table.close(ids[connection]).is_some(), "{place}: it is gone"),
                Pass(seconds) => now += Duration::from_secs(*seconds),
            }
        }
        for id in ids.values() {
            table.close(*id);
        }
        assert!(table.connections.is_empty() && table.addresses.is_empty() && table.reserved == 0, "{name}");
    }

    #[test]
    fn connections_give_way_by_what_they_do_and_what_their_address_holds() {
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
            "who speaks is not silent",
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
    fn probes_have_places_that_nobody_else_takes() {
        play(
            "places for probes count for nothing else",
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
            "where all else is taken, the oldest of them gives way",
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
    fn trusted_probe_address_keeps_the_places_for_probes_until_all_others_are_busy() {
        const BOTH: Sender = sender(7, true, true);
        let mut table = ConnectionTable::new(LIMITS);
        let now = Instant::now();
        for number in 0..LIMITS.connections {
            let opened = table.open(BOTH, number, now).unwrap();
            assert!(!opened.reserved, "{number}");
            table.asked(opened.id, now);
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
}
