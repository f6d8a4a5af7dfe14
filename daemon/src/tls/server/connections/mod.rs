//! The connections of one server, and the one that gives way to a new one. Pure: the clock is an argument.
//!
//! ```text
//!  open ──▶ silent ── head of a request ──▶ busy ◀── head ── idle
//!             │                               └── answer ────▶ ▲
//!             └ handshake or first head is under way
//! ```
//!
//! A new connection is refused only when no other gives way to it. Among the addresses without a proof, the one with the most
//! connections loses its oldest one: first a silent one, then an idle one. A request under way is ended only for an address
//! with fewer connections, or after [`STALLED`]. One address therefore cannot shut out another, and silent connections shut
//! out no one.
//!
//! | connections of | at a time |
//! |---|---|
//! | probe addresses | the first `probes` ones have slots that no other address takes |
//! | addresses without a proof, silent | `silent` |
//! | one address without a proof | `share` |
//! | all addresses without a proof | `others` |
//! | all | `connections`; those without a proof give way to those with one |
//!
//! A connection that is kept gives way to no other one. It counts for `connections` alone.

use std::{
    cmp::Reverse,
    collections::HashMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use super::limits::Limits;

/// Time after which a request under way gives way to a new connection of the same address. Every answer to a client without
/// credentials takes less.
const STALLED: Duration = Duration::from_secs(5);

/// The other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sender {
    pub(super) address: IpAddr,
    /// The address has proven to be an API server, or another client that the server knows by a certificate.
    pub(super) trusted: bool,
    /// kubelet's probes come from this address.
    pub(super) probes: bool,
}

/// A connection that was accepted.
#[derive(Debug)]
pub(super) struct Opened<T> {
    /// Its number in the table.
    pub(super) id: u64,
    /// Its slot is one of those for probes.
    pub(super) reserved: bool,
    /// The connections that gave way to it.
    pub(super) gave_way: Vec<T>,
}

/// The error that all slots are in use and no connection gives way.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Full;

/// The connections that are open. `T` is the means to end one.
pub(super) struct ConnectionTable<T> {
    limits: Limits,
    next: u64,
    connections: HashMap<u64, Connection<T>>,
    /// Connections by address, without those on slots for probes.
    addresses: HashMap<IpAddr, Held>,
    /// Connections on slots for probes.
    reserved: usize,
    /// Connections that give way to no other one.
    kept: usize,
}

struct Connection<T> {
    address: IpAddr,
    reserved: bool,
    kept: bool,
    state: State,
    since: Instant,
    end: T,
}

impl<T> Connection<T> {
    /// Returns true if it counts for its address.
    fn is_ordinary(&self) -> bool {
        !self.reserved && !self.kept
    }
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
        Self { limits, next: 0, connections: HashMap::new(), addresses: HashMap::new(), reserved: 0, kept: 0 }
    }

    /// Accepts a new connection and removes those that give way to it.
    pub(super) fn open(&mut self, sender: Sender, end: T, now: Instant) -> Result<Opened<T>, Full> {
        if let Some(held) = self.addresses.get_mut(&sender.address) {
            held.trusted = sender.trusted;
        }
        let mut gave_way = Vec::new();
        let reserve = sender.probes && self.reserved < self.limits.probes;
        // An API server on the node of the pod has the address of kubelet, and needs more than the few slots for probes.
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
        self.connections
            .insert(id, Connection { address, reserved, kept: false, state: State::Silent, since: now, end });
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

    /// Records that the head of a request was received.
    pub(super) fn requested(&mut self, id: u64, now: Instant) {
        self.put(id, State::Busy, now);
    }

    /// Records that a request is answered, and whether the address has a proof by now.
    pub(super) fn answered(&mut self, id: u64, trusted: bool, now: Instant) {
        let address = self.put(id, State::Idle, now);
        if let Some(held) = address.and_then(|address| self.addresses.get_mut(&address)) {
            held.trusted = trusted;
        }
    }

    /// Keeps a connection: it gives way to no other one, and counts for no address.
    pub(super) fn keep(&mut self, id: u64) {
        let Some(mut connection) = self.connections.remove(&id) else { return };
        self.uncount(&connection);
        connection.kept = true;
        self.kept += 1;
        self.connections.insert(id, connection);
    }

    /// Removes a connection that has ended or gives way.
    pub(super) fn close(&mut self, id: u64) -> Option<T> {
        let connection = self.connections.remove(&id)?;
        self.uncount(&connection);
        Some(connection.end)
    }

    fn uncount(&mut self, connection: &Connection<T>) {
        if connection.kept {
            self.kept -= 1;
        } else if connection.reserved {
            self.reserved -= 1;
        } else if let Some(held) = self.addresses.get_mut(&connection.address) {
            held.connections -= 1;
            held.silent -= usize::from(connection.state == State::Silent);
            if held.connections == 0 {
                self.addresses.remove(&connection.address);
            }
        }
    }

    fn put(&mut self, id: u64, state: State, now: Instant) -> Option<IpAddr> {
        let connection = self.connections.get_mut(&id)?;
        if connection.state == State::Silent
            && connection.is_ordinary()
            && let Some(held) = self.addresses.get_mut(&connection.address)
        {
            held.silent -= 1;
        }
        connection.state = state;
        connection.since = now;
        Some(connection.address)
    }

    fn exceeded(&self, sender: Sender) -> Option<Exceeded> {
        let (mut all, mut others, mut silent) = (self.kept, 0, 0);
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

    /// Returns the connection that gives way to a new one of `sender`.
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

    /// Returns the connection on a slot for probes that gives way to a new one.
    fn reserved_gives_way(&self, now: Instant) -> Option<u64> {
        let reserved = self.connections.iter().filter(|(_, connection)| connection.reserved && !connection.kept);
        let ends = reserved.filter(|(_, connection)| connection.state != State::Busy || stalled(connection, now));
        ends.min_by_key(|(id, connection)| (connection.state, connection.since, **id)).map(|(id, _)| *id)
    }

    /// Returns the connection with the least key, and the older of two with the same; those without a key stay.
    fn first<K: Ord>(&self, key: impl Fn(&Connection<T>, &Held) -> Option<K>) -> Option<u64> {
        let ordinary = self.connections.iter().filter(|(_, connection)| connection.is_ordinary());
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
mod tests;
