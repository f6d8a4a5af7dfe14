//! Watches of the API server, which begin anew with jitter.
//!
//! All processes of an installation lose their watches when an API server restarts, and many begin theirs together after an upgrade. So
//! each watch has a duration of its own, and after an error each waits for a random part of a window that doubles with errors in a
//! row. kube's back-off has half of this spread, and never grows while lists fail: a stream of events reports the beginning of a
//! list before it requests the list.
//!
//! Watches last long, as each new one is a request. A connection that was lost silently is noticed by its silence (`client/silence.rs`).

use std::{fmt::Debug, time::Duration};

use futures::{Stream, StreamExt, stream};
use k8s_openapi::serde::de::DeserializeOwned;
use kube::{
    Api, Resource,
    runtime::watcher::{self, Event},
};
use tokio::time::Instant;
use uuid::Uuid;

use crate::backoff;

/// Shortest duration of a watch, and the range above it, in seconds. They are those of kube-apiserver for clients that name none.
const DURATION: (u32, u32) = (1800, 1800);
/// Shortest silence that ends a watch, and the range above it, in seconds. kube-apiserver sends a bookmark a minute.
const SILENCE: (u32, u32) = (230, 60);
/// Window of the pause after the first error, and the longest one.
const WINDOW: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(30));
/// Time after which an error counts as the first one again: a watch without events does not show that it was established.
const FORGET: Duration = Duration::from_secs(120);

/// Watches the objects that `config` selects for ever. The duration of `config` is replaced. A client of [`crate::client::connect`] notices
/// a connection that was lost silently.
pub fn events<K>(api: Api<K>, config: watcher::Config) -> impl Stream<Item = watcher::Result<Event<K>>> + Send
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    paced(watcher::watcher(api, config.timeout(duration())))
}

/// Watches the object `name` for ever. Yields each version; `None`: it does not exist.
pub fn versions<K>(api: Api<K>, name: &str) -> impl Stream<Item = watcher::Result<Option<K>>> + Send + use<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    of_one(events(api, watcher::Config::default().fields(&format!("metadata.name={name}"))))
}

/// Calls `seen` with each version of the object `name` (`None`: it does not exist). Never returns.
pub(crate) async fn follow<K, F>(api: Api<K>, name: String, mut seen: F)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    F: FnMut(Option<K>) + Send + 'static,
{
    let mut all = std::pin::pin!(versions(api, &name));
    while let Some(version) = all.next().await {
        match version {
            Ok(object) => seen(object),
            Err(error) => {
                tracing::warn!(object = %name, error = %crate::errors::chain(&error), "watch was interrupted")
            }
        }
    }
}

/// Turns the events of a watch of one object into its versions.
fn of_one<K: Send>(
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send,
) -> impl Stream<Item = watcher::Result<Option<K>>> + Send {
    let mut is_listed = false;
    events.filter_map(move |event| {
        let version = match event {
            Ok(Event::Init) => {
                is_listed = false;
                None
            }
            Ok(Event::InitApply(object)) => {
                is_listed = true;
                Some(Ok(Some(object)))
            }
            Ok(Event::InitDone) => (!is_listed).then_some(Ok(None)),
            Ok(Event::Apply(object)) => Some(Ok(Some(object))),
            Ok(Event::Delete(_)) => Some(Ok(None)),
            Err(error) => Some(Err(error)),
        };
        std::future::ready(version)
    })
}

/// Pauses after errors.
fn paced<K: Send>(
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send,
) -> impl Stream<Item = watcher::Result<Event<K>>> + Send {
    let start = (Box::pin(events), Errors::default(), None::<Duration>);
    stream::unfold(start, |(mut events, mut errors, pause)| async move {
        if let Some(pause) = pause {
            tokio::time::sleep(pause).await;
        }
        let event = events.next().await?;
        let pause = errors.record(&event, Instant::now()).map(|window| part(window, random()));
        Some((event, (events, errors, pause)))
    })
}

/// Errors in a row of one watch.
#[derive(Debug, Default)]
struct Errors {
    in_a_row: u32,
    last: Option<Instant>,
}

impl Errors {
    /// Records an event. Returns the window of the pause after it.
    fn record<K>(&mut self, event: &watcher::Result<Event<K>>, now: Instant) -> Option<Duration> {
        let error = match event {
            // The next page of the list may fail.
            Ok(Event::Init | Event::InitApply(_)) => return None,
            Ok(Event::InitDone | Event::Apply(_) | Event::Delete(_)) => {
                self.in_a_row = 0;
                return None;
            }
            Err(error) => error,
        };
        let is_first = is_expired(error) || self.last.is_none_or(|last| now.duration_since(last) >= FORGET);
        self.in_a_row = if is_first { 1 } else { self.in_a_row.saturating_add(1) };
        self.last = Some(now);
        Some(backoff::pause(WINDOW, self.in_a_row))
    }
}

/// Returns true if the API server accepted the watch but no longer has the version to continue from, as after its restart. A list follows.
fn is_expired(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::WatchError(status) if status.code == 410)
}

/// Returns the part of `window` that `random` selects, in milliseconds.
fn part(window: Duration, random: u128) -> Duration {
    Duration::from_millis(u64::try_from(random % window.as_millis().max(1)).unwrap_or_default())
}

/// Returns a duration for a watch, in seconds.
#[must_use]
pub fn duration() -> u32 {
    selected(DURATION, random())
}

/// Returns a time after which a watch on which nothing arrives ends.
pub(crate) fn silence() -> Duration {
    Duration::from_secs(u64::from(selected(SILENCE, random())))
}

/// Returns the number of seconds that `random` selects, from the shortest one and the range above it.
fn selected((shortest, range): (u32, u32), random: u128) -> u32 {
    shortest + u32::try_from(random % u128::from(range)).unwrap_or_default()
}

/// Returns a random number. Its low 62 bits are evenly distributed.
fn random() -> u128 {
    Uuid::new_v4().as_u128()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::{ResourceExt, core::Status};

    use super::*;

    fn named(name: &str) -> ConfigMap {
        let mut object = ConfigMap::default();
        object.metadata.name = Some(name.to_owned());
        object
    }

    fn failed() -> watcher::Result<Event<ConfigMap>> {
        Err(watcher::Error::NoResourceVersion)
    }

    fn answered(code: u16) -> watcher::Result<Event<ConfigMap>> {
        Err(watcher::Error::WatchError(Status::failure("", "").with_code(code).boxed()))
    }

    #[test]
    fn windows_double_until_a_list_is_complete_or_an_event_arrives() {
        let (start, mut errors) = (Instant::now(), Errors::default());
        // Seconds since the start, event, window in seconds.
        for (at, event, expected) in [
            (0, failed(), Some(2)),
            (1, failed(), Some(4)),
            // The request for the list comes after its beginning, and a page of it proves little.
            (2, Ok(Event::Init), None),
            (2, failed(), Some(8)),
            (3, Ok(Event::Init), None),
            (3, Ok(Event::InitApply(named("a"))), None),
            (3, answered(500), Some(16)),
            (4, failed(), Some(30)),
            (5, failed(), Some(30)),
            // The API server answers again.
            (6, answered(410), Some(2)),
            (7, failed(), Some(4)),
            (8, Ok(Event::InitDone), None),
            (9, failed(), Some(2)),
            (10, failed(), Some(4)),
            (11, Ok(Event::Apply(named("a"))), None),
            (12, failed(), Some(2)),
            (13, Ok(Event::Delete(named("a"))), None),
            (14, failed(), Some(2)),
            (133, failed(), Some(4)),
            (253, failed(), Some(2)),
        ] {
            let window = errors.record(&event, start + Duration::from_secs(at));
            assert_eq!(window, expected.map(Duration::from_secs), "at {at}");
        }
    }

    #[test]
    fn pauses_and_durations_cover_their_ranges() {
        for (window, random, expected) in
            [(2000, 0, 0), (2000, 1999, 1999), (2000, 2000, 0), (30_000, 31_234, 1234), (0, 7, 0)]
        {
            assert_eq!(
                part(Duration::from_millis(window), random),
                Duration::from_millis(expected),
                "{window} {random}"
            );
        }
        for (random, expected) in [(0, 230), (59, 289), (60, 230), (u128::MAX, 245)] {
            assert_eq!(selected(SILENCE, random), expected, "{random}");
        }
        for (random, expected) in [(0, 1800), (1799, 3599), (1800, 1800)] {
            assert_eq!(selected(DURATION, random), expected, "{random}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_lost_by_pauses() {
        let events = [failed(), Ok(Event::Init), failed(), Ok(Event::Init), Ok(Event::InitApply(named("a"))), failed()];
        let expected: Vec<String> = events.iter().map(|event| format!("{event:?}")).collect();
        let paced: Vec<String> = paced(stream::iter(events)).map(|event| format!("{event:?}")).collect().await;
        assert_eq!(paced, expected);
    }

    #[tokio::test]
    async fn one_object_exists_when_it_is_listed_or_changed() {
        let events = [
            Ok(Event::Init),
            Ok(Event::InitDone),
            Ok(Event::Apply(named("a"))),
            failed(),
            Ok(Event::Init),
            Ok(Event::InitApply(named("b"))),
            Ok(Event::InitDone),
            Ok(Event::Delete(named("b"))),
            Ok(Event::Init),
            Ok(Event::InitDone),
        ];
        let versions: Vec<Option<Option<String>>> = of_one(stream::iter(events))
            .map(|version| Some(version.ok()?.map(|object| object.name_any())))
            .collect()
            .await;
        let name = |name: &str| Some(Some(name.to_owned()));
        assert_eq!(versions, [Some(None), name("a"), None, name("b"), Some(None), Some(None)]);
    }
}
