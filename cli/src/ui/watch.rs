//! The list of VMs and VMIs and its changes, sent to a page as texts in JSON.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::{SinkExt, Stream, StreamExt, TryStreamExt, stream::select};
use kube::{
    Api,
    api::{ApiResource, DynamicObject},
    runtime::{
        WatchStreamExt,
        utils::Backoff,
        watcher::{self, DefaultBackoff, Event, watcher},
    },
};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_tungstenite::{WebSocketStream, tungstenite::Message};

use super::rows;
use crate::Connection;

/// A back-off that the end of a list and changes of objects reset. Any event would, and a stream has one before it requests a list:
/// pauses between lists that fail would not grow.
#[derive(Default)]
struct Pauses {
    backoff: DefaultBackoff,
    /// The last event shows that the API server answers.
    is_answered: Arc<AtomicBool>,
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.backoff.next()
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {
        if self.is_answered.load(Ordering::Relaxed) {
            self.backoff.reset();
        }
    }
}

/// Returns true for an event of a complete list. The next page of any other may fail.
fn is_answer(event: &Event<DynamicObject>) -> bool {
    matches!(event, Event::InitDone | Event::Apply(_) | Event::Delete(_))
}

/// Sends the list of a namespace, or of all, until the page leaves.
pub(super) async fn serve<S>(connection: &Connection, namespace: Option<&str>, page: &mut WebSocketStream<S>)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut changes = select(
        changes(connection, namespace, "VirtualMachine", "virtualmachines", rows::vm),
        changes(connection, namespace, "VirtualMachineInstance", "virtualmachineinstances", rows::vmi),
    );
    let mut message = json!({"event": "scope", "namespace": namespace});
    while page.send(Message::text(message.to_string())).await.is_ok() {
        message = tokio::select! {
            Some(change) = changes.next() => change,
            // Pages send nothing: this is the end.
            _ = page.next() => return,
        };
    }
}

/// Watches one kind.
fn changes(
    connection: &Connection,
    namespace: Option<&str>,
    kind: &'static str,
    plural: &str,
    row: fn(&Value) -> Value,
) -> impl Stream<Item = Value> + Unpin + use<> {
    let resource = ApiResource {
        group: "kubevirt.io".into(),
        version: "v1".into(),
        api_version: "kubevirt.io/v1".into(),
        kind: kind.into(),
        plural: plural.into(),
    };
    let client = connection.client.clone();
    let api = match namespace {
        Some(namespace) => Api::<DynamicObject>::namespaced_with(client, namespace, &resource),
        None => Api::all_with(client, &resource),
    };
    let pauses = Pauses::default();
    let is_answered = pauses.is_answered.clone();
    let changes = watcher(api, watcher::Config::default())
        .inspect_ok(move |event| is_answered.store(is_answer(event), Ordering::Relaxed))
        .backoff(pauses);
    changes.map(move |change| render(kind, change, row)).boxed()
}

/// Renders a change.
fn render(kind: &str, change: watcher::Result<Event<DynamicObject>>, row: fn(&Value) -> Value) -> Value {
    let value = |object: &DynamicObject| serde_json::to_value(object).unwrap_or_default();
    match change {
        Ok(Event::Init) => json!({"event": "begin", "kind": kind}),
        Ok(Event::InitDone) => json!({"event": "complete", "kind": kind}),
        Ok(Event::InitApply(object) | Event::Apply(object)) => {
            json!({"event": "apply", "kind": kind, "row": row(&value(&object))})
        }
        Ok(Event::Delete(object)) => json!({"event": "delete", "kind": kind, "row": rows::identity(&value(&object))}),
        Err(error) => json!({"event": "error", "kind": kind, "message": message(&error)}),
    }
}

/// Returns the message of the API server, else the whole error.
fn message(error: &watcher::Error) -> String {
    use kube::Error::Api;
    match error {
        watcher::Error::InitialListFailed(Api(status))
        | watcher::Error::WatchStartFailed(Api(status))
        | watcher::Error::WatchFailed(Api(status))
        | watcher::Error::WatchError(status) => status.message.clone(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_carry_fields_of_objects_and_messages_of_the_api_server() {
        let object = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"namespace": "a", "name": "box"},
            "spec": {"running": true},
        });
        let object = || serde_json::from_value::<DynamicObject>(object.clone()).unwrap();
        let refusal = kube::core::Status::failure("virtualmachines is forbidden", "Forbidden");
        let (row, identity) =
            (rows::vm(&serde_json::to_value(object()).unwrap()), json!({"namespace": "a", "name": "box"}));
        for (change, expected) in [
            (Ok(Event::Init), json!({"event": "begin", "kind": "k"})),
            (Ok(Event::InitApply(object())), json!({"event": "apply", "kind": "k", "row": row})),
            (Ok(Event::Apply(object())), json!({"event": "apply", "kind": "k", "row": row})),
            (Ok(Event::Delete(object())), json!({"event": "delete", "kind": "k", "row": identity})),
            (Ok(Event::InitDone), json!({"event": "complete", "kind": "k"})),
            (
                Err(watcher::Error::InitialListFailed(kube::Error::Api(Box::new(refusal)))),
                json!({"event": "error", "kind": "k", "message": "virtualmachines is forbidden"}),
            ),
        ] {
            assert_eq!(render("k", change, rows::vm), expected);
        }
    }

    #[test]
    fn pauses_grow_until_the_api_server_answers() {
        let object = || DynamicObject { types: None, metadata: kube::api::ObjectMeta::default(), data: Value::Null };
        for answer in [Event::InitDone, Event::Apply(object()), Event::Delete(object())] {
            let mut pauses = Pauses::default();
            let mut pause = |event: &Event<DynamicObject>| {
                pauses.is_answered.store(is_answer(event), Ordering::Relaxed);
                pauses.reset();
                pauses.next().unwrap()
            };
            let failing = [Event::Init, Event::InitApply(object())];
            let longest = failing.iter().cycle().take(8).map(&mut pause).last();
            assert!(longest >= Some(Duration::from_secs(30)), "{longest:?}");
            assert!(pause(&answer) < Duration::from_secs(2));
        }
    }
}
