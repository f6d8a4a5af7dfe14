//! Start, requests, changes and end of a VMI.

use api::traceparent::TraceParent;
use daemon::telemetry::Traces;
use protocol::{GuestAgent, GuestInfo, Lifecycle, features::Feature};
use tonic::Status;

use super::*;
use crate::vmi::{Refusal, Request};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vmi_is_running_after_one_write() {
    let stage = Stage::new();
    stage.vmis.apply(Arc::new(stage.records.put(&vmi("m", "u1"))));
    tokio::time::sleep(Duration::from_millis(30)).await;
    stage.host.serve(&stage.launcher);
    let vmi = stage.until_phase(&Phase::Running).await;
    assert_eq!(stage.launcher.calls(), ["hello 1", "sync m nics=1"]);
    assert_eq!(stage.records.patches.lock().unwrap().len(), 1);
    let status = vmi.status.unwrap();
    assert_eq!(status.interfaces[0].ip_address.as_deref(), Some("10.244.0.9"));
    assert!(status.interfaces[0].mac.as_deref().unwrap().starts_with("52:54:00:"));
    assert_eq!(status.machine.as_ref().unwrap().type_, "pc-q35-10.0");
    let phases: Vec<_> = status.phase_transition_timestamps.iter().map(|entry| entry.phase.clone().unwrap()).collect();
    assert_eq!(phases, [Phase::Scheduled, Phase::Running]);
    assert!(status.condition("LiveMigratable").unwrap().is_true());
    stage.until_event("Created").await;
    stage.until_event("Started").await;
    stage.stop.cancel();
    stage.vmis.stopped().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_traced_start_has_spans_of_virt_handler_and_of_its_launcher() {
    const CONTEXT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let (traces, mut spans) = Traces::to_receiver(1.0).unwrap();
    let mut stage = Stage::new();
    stage.vmis = stage.vmis.clone().with_traces(traces);
    let mut object = vmi("m", "u1");
    object["metadata"]["annotations"] = json!({"ferrovirt.io/traceparent": CONTEXT});
    object["metadata"]["creationTimestamp"] = json!(jiff::Timestamp::now().to_string());
    stage.vmis.apply(Arc::new(stage.records.put(&object)));
    tokio::time::sleep(Duration::from_millis(30)).await;
    stage.host.serve(&stage.launcher);
    stage.until_phase(&Phase::Running).await;
    // Published after Sync and the write have ended.
    stage.until_event("Created").await;
    stage.until_event("Started").await;
    // Not part of the start.
    stage.change(|vmi| vmi["metadata"]["labels"]["a"] = json!("b"));
    stage.stop.cancel();
    stage.vmis.stopped().await;

    let context: TraceParent = CONTEXT.parse().unwrap();
    let mut found = Vec::new();
    while let Ok(span) = spans.try_recv() {
        assert_eq!((span.context.trace_id, span.error.as_deref()), (context.trace_id, None), "{span:?}");
        found.push(span);
    }
    let of = |name: &str| {
        let named: Vec<_> = found.iter().filter(|span| span.name == name).collect();
        assert_eq!(named.len(), 1, "{name}: {found:?}");
        named[0].clone()
    };
    for name in ["connect", "hello", "network", "sync", "write"] {
        let span = of(name);
        assert_eq!((span.parent, span.service), (Some(context.span_id), None), "{name}");
        assert!(span.attributes.contains(&("uid", "u1".to_owned())), "{:?}", span.attributes);
    }
    let create = of("create");
    assert_eq!((create.parent, create.service), (Some(of("sync").context.span_id), Some("virt-launcher")));
    assert_eq!(found.len(), 6, "{found:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_vmi_is_shut_down_recorded_and_released() {
    let stage = Stage::running().await;
    stage.change(|vmi| vmi["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
    let vmi = stage.until_phase(&Phase::Succeeded).await;
    assert!(vmi.status.unwrap().condition("Paused").is_none());
    stage.until_called("finish").await;
    assert!(stage.launcher.calls().contains(&"shutdown 30".to_owned()));
    assert!(stage.records.reasons().contains(&"ShuttingDown"));
    stage.until_event("Deleted").await;
    stage.records.objects.lock().unwrap().clear();
    stage.vmis.remove("ns", "m");
    stage.until_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launcher_of_an_older_release_gets_a_call_for_each_job() {
    for offers_jobs in [true, false] {
        let stage = Stage::new();
        if !offers_jobs {
            stage.launcher.features.lock().unwrap().retain(|name| name != Feature::Jobs.name());
        }
        stage.host.serve(&stage.launcher);
        stage.vmis.apply(Arc::new(stage.records.put(&vmi("m", "u1"))));
        stage.until_phase(&Phase::Running).await;
        stage.change(|vmi| vmi["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
        stage.until_called("shutdown 30").await;
        assert_eq!(stage.launcher.calls().contains(&"job".to_owned()), offers_jobs);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vmi_ends_with_its_object() {
    let stage = Stage::running().await;
    stage.records.objects.lock().unwrap().clear();
    stage.vmis.remove("ns", "m");
    stage.until_called("shutdown 30").await;
    stage.until_called("finish").await;
    stage.until_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_powers_off_by_itself_has_succeeded() {
    let stage = Stage::running().await;
    stage.launcher.become_(Lifecycle::Shutoff, "shutdown");
    stage.until_phase(&Phase::Succeeded).await;
    stage.until_called("finish").await;
    assert!(stage.records.events.lock().unwrap().iter().any(|event| {
        event.reason == "Stopped" && !event.warning && event.message == "The VirtualMachineInstance was shut down."
    }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_qemu_that_dies_fails_the_vmi() {
    let stage = Stage::running().await;
    stage.launcher.become_(Lifecycle::Shutoff, "crashed");
    stage.until_phase(&Phase::Failed).await;
    stage.until_called("finish").await;
    assert!(stage.records.events.lock().unwrap().iter().any(|event| event.reason == "Stopped" && event.warning));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_start_is_shown_and_retried() {
    let stage = Stage::new();
    *stage.launcher.refuse_sync.lock().unwrap() = Some(Status::internal("disk root: no such file"));
    stage.host.serve(&stage.launcher);
    stage.vmis.apply(Arc::new(stage.records.put(&vmi("m", "u1"))));
    let failed = stage.records.until("m", "Synchronized", |vmi| vmi.condition("Synchronized").is_some()).await;
    let condition = failed.condition("Synchronized").unwrap();
    assert_eq!((condition.status.as_str(), condition.message.as_deref()), ("False", Some("disk root: no such file")));
    assert_eq!(failed.phase(), &Phase::Scheduled);
    assert!(stage.records.reasons().contains(&"SyncFailed"));
    *stage.launcher.refuse_sync.lock().unwrap() = None;
    stage.until_phase(&Phase::Running).await;
    stage.records.until("m", "no Synchronized", |vmi| vmi.condition("Synchronized").is_none()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vmi_that_cannot_be_served_fails() {
    let stage = Stage::new();
    let failure = NetworkFailure { message: "secondary networks are not supported".into(), permanent: true };
    *stage.host.network.lock().unwrap() = Some(failure);
    stage.host.serve(&stage.launcher);
    stage.vmis.apply(Arc::new(stage.records.put(&vmi("m", "u1"))));
    let failed = stage.until_phase(&Phase::Failed).await;
    assert_eq!(
        failed.condition("Synchronized").unwrap().message.as_deref(),
        Some("failed to configure vmi network: secondary networks are not supported")
    );
    stage.until_called("finish").await;
    assert!(!stage.launcher.calls().iter().any(|call| call.starts_with("sync")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_can_pause_a_running_vmi_and_gets_the_error_of_a_failed_reset() {
    let stage = Stage::running().await;
    let handle = stage.vmis.get("ns", "m").unwrap();
    handle.request(Request::Pause).await.unwrap();
    // The answer arrives after the object shows the pause, so that the next request is not rejected because of it.
    assert_eq!(stage.records.get("m").condition("Paused").unwrap().reason.as_deref(), Some("PausedByUser"));
    handle.request(Request::Unpause).await.unwrap();
    assert!(stage.records.get("m").condition("Paused").is_none());
    let refused = handle.request(Request::Reset).await.unwrap_err();
    assert!(matches!(refused, Refusal::Launcher(_)));
    assert_eq!(refused.to_string(), "no button");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_object_of_the_same_name_gets_a_task_of_its_own() {
    let stage = Stage::running().await;
    let mut object = vmi("m", "u2");
    object["metadata"]["resourceVersion"] = json!("99");
    object["status"]["activePods"] = json!({});
    stage.vmis.apply(Arc::new(stage.records.put(&object)));
    stage.until_called("shutdown 30").await;
    stage.until_called("finish").await;
    assert_eq!(stage.vmis.get("ns", "m").unwrap().uid, "u2");
}

#[tokio::test]
async fn a_vmi_of_another_node_is_not_managed_even_if_its_label_names_this_node() {
    for node in [json!("n2"), json!(""), json!(null)] {
        let stage = Stage::new();
        let mut object = vmi("m", "u1");
        object["status"]["nodeName"] = node.clone();
        stage.vmis.apply(Arc::new(stage.records.put(&object)));
        assert!(stage.vmis.get("ns", "m").is_none(), "{node}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn vmis_beyond_the_limit_are_left_out_until_others_end() {
    let stage = Stage::running().await;
    let see = |name: &str, uid: &str| stage.vmis.apply_up_to(1, Arc::new(stage.records.put(&vmi(name, uid))));
    for name in ["a", "b", "a"] {
        see(name, name);
        assert!(stage.vmis.get("ns", name).is_none());
    }
    assert_eq!(stage.vmis.left_out().len(), 2);
    // A managed VMI is fed as before.
    see("m", "u1");
    assert_eq!((stage.vmis.all().len(), stage.vmis.left_out().len()), (1, 2));
    stage.vmis.remove("ns", "b");
    assert_eq!(stage.vmis.left_out().len(), 1);
    stage.change(|object| object["metadata"]["labels"] = json!({}));
    stage.vmis.remove("ns", "m");
    tokio::time::timeout(PATIENCE, stage.vmis.freed.notified()).await.expect("no notification");
    stage.until_left().await;
    see("a", "a");
    assert!(stage.vmis.get("ns", "a").is_some() && stage.vmis.left_out().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_file_systems_show_in_the_status_until_they_are_thawed() {
    let stage = Stage::running().await;
    stage.launcher.report(|state| {
        state.guest_agent_connected = true;
        state.file_systems = "frozen".into();
        state.guest = Some(GuestInfo { name: "Debian".into(), id: "debian".into(), ..GuestInfo::default() });
        state.agent = Some(GuestAgent { version: "10.0".into(), commands: Vec::new() });
    });
    let frozen = stage.records.until("m", "frozen", |vmi| {
        vmi.status.as_ref().is_some_and(|status| status.fs_freeze_status.as_deref() == Some("frozen"))
    });
    let status = frozen.await.status.unwrap();
    assert_eq!(status.guest_os_info.id.as_deref(), Some("debian"));
    assert!(status.condition("AgentConnected").is_some_and(|condition| condition.is_true()));
    assert!(status.condition("AgentVersionNotSupported").is_some_and(|condition| condition.is_true()));
    stage.launcher.report(|state| state.file_systems = "thawed".into());
    let thawed =
        stage.records.until("m", "thawed", |vmi| vmi.status.as_ref().is_some_and(|s| s.fs_freeze_status.is_none()));
    thawed.await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn items_that_are_not_in_line_with_the_spec_are_shown() {
    let stage = Stage::running().await;
    let item = |name: &str| protocol::ItemResult {
        kind: protocol::ItemKind::Volume.into(),
        name: name.into(),
        message: "no such file".into(),
        needs_restart: false,
    };
    stage.launcher.report(|state| state.items = vec![item("data")]);
    let shown = stage.records.until("m", "Synchronized", |vmi| vmi.condition("Synchronized").is_some()).await;
    let condition = shown.condition("Synchronized").unwrap();
    assert_eq!(condition.message.as_deref(), Some("volume data: no such file"));
    assert_eq!(shown.phase(), &Phase::Running);
    stage.launcher.report(|state| state.items.clear());
    stage.records.until("m", "no Synchronized", |vmi| vmi.condition("Synchronized").is_none()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launcher_of_an_older_release_does_not_get_changes_silently() {
    let stage = Stage::new();
    stage.launcher.features.lock().unwrap().clear();
    stage.host.serve(&stage.launcher);
    stage.vmis.apply(Arc::new(stage.records.put(&vmi("m", "u1"))));
    let running = stage.until_phase(&Phase::Running).await;
    assert!(running.condition("Synchronized").is_none());
    stage.change(|vmi| vmi["metadata"]["labels"]["team"] = json!("blue"));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(stage.records.get("m").condition("Synchronized").is_none());
    stage.change(|vmi| vmi["spec"]["domain"]["cpu"] = json!({"sockets": 2}));
    let shown = stage.records.until("m", "Synchronized", |vmi| vmi.condition("Synchronized").is_some()).await;
    let condition = shown.condition("Synchronized").unwrap();
    assert_eq!(condition.reason.as_deref(), Some("LauncherFeatureMissing"));
}
