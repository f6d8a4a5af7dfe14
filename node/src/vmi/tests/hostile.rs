//! Hostile launchers, guests and objects.

use protocol::{GuestAgent, GuestInfo, Lifecycle};

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cve_2026_13208_an_object_that_names_the_pod_of_another_vmi_reaches_nothing_of_it() {
    let stage = Stage::new();
    stage.launcher.become_(Lifecycle::Running, "booted");
    stage.host.serve(&stage.launcher);
    stage.vmis.apply(Arc::new(stage.records.put(&vmi("m", "intruder"))));
    let failed = stage.until_phase(&Phase::Failed).await;
    assert!(failed.status.unwrap().interfaces.is_empty());
    stage.change(|vmi| vmi["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(stage.launcher.calls().is_empty());
    assert!(stage.vmis.get("ns", "m").unwrap().launcher().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_reports_all_the_time_is_written_rarely() {
    let stage = Stage::running().await;
    let writes = stage.records.patches.lock().unwrap().len();
    for number in 0..200_u32 {
        stage.launcher.state.send_modify(|state| {
            state.guest_agent_connected = true;
            state.memory_current = u64::from(number + 1) << 20;
            state.interfaces = vec![protocol::GuestInterface {
                name: format!("eth{number}"),
                mac: "02:00:00:00:00:09".into(),
                addresses: vec![format!("10.0.{number}.1")],
            }];
        });
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let written = stage.records.patches.lock().unwrap().len() - writes;
    assert!(written <= 1, "{written} writes in two seconds");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cve_2026_13322_a_state_that_is_too_large_breaks_the_connection_it_came_over() {
    let stage = Stage::running().await;
    // Two bytes each in the message.
    stage.launcher.report(|state| state.interfaces = vec![protocol::GuestInterface::default(); 300_000]);
    let lost = async {
        while stage.vmis.get("ns", "m").unwrap().launcher().is_ok() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, lost).await.expect("the state was read");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launcher_that_reports_all_the_time_does_not_cause_writes_all_the_time() {
    let stage = Stage::running().await;
    let writes = stage.records.patches.lock().unwrap().len();
    for number in 0..200_u32 {
        stage.launcher.report(|state| {
            state.machine_type = format!("pc-{number}");
            state.file_systems = if number % 2 == 0 { "frozen" } else { "thawed" }.into();
        });
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let written = stage.records.patches.lock().unwrap().len() - writes;
    assert!(written <= 14, "{written} writes in two seconds");
}

/// Another VMI on the same node, whose launcher is not connected yet.
const OTHER: &str = "other";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cve_2026_13208_reports_of_a_launcher_apply_to_the_vmi_of_its_socket_only() {
    let stage = Stage::running().await;
    let other = stage.records.put(&vmi(OTHER, "u2"));
    let before = serde_json::to_value(&other).unwrap();
    let claim = || format!("ns/{OTHER} u2");
    // Every text contains name and UID of the other VMI.
    stage.launcher.report(|state| {
        state.reason = claim();
        state.machine_type = claim();
        state.guest_agent_connected = true;
        state.guest =
            Some(GuestInfo { name: claim(), hostname: OTHER.into(), id: "u2".into(), ..GuestInfo::default() });
        state.agent = Some(GuestAgent { version: claim(), commands: Vec::new() });
        state.interfaces =
            vec![protocol::GuestInterface { name: claim(), mac: claim(), addresses: vec!["10.244.0.99".into()] }];
        state.disks = vec![protocol::DiskTarget { volume: claim(), target: claim(), size: 1 }];
        state.guest_panic = Some(protocol::GuestPanic { kind: claim(), values: vec![claim()] });
    });
    let written = stage.records.until("m", "the report", |vmi| {
        vmi.status.as_ref().is_some_and(|status| status.guest_os_info.id.as_deref() == Some("u2"))
    });
    let written = written.await;
    assert_eq!(written.metadata.uid.as_deref(), Some("u1"));
    let launcher = stage.vmis.get("ns", "m").unwrap().launcher().unwrap();
    let report = launcher.call(protocol::GuestReportRequest {}, PATIENCE).await.unwrap();
    assert_eq!(report.guest.unwrap().hostname, "web", "the answer of this socket");
    // The domain ends: only its own VMI ends.
    stage.launcher.become_(Lifecycle::Shutoff, &claim());
    stage.until_phase(&Phase::Failed).await;
    assert_eq!(serde_json::to_value(stage.records.get(OTHER)).unwrap(), before);
    let patches = stage.records.patches.lock().unwrap();
    let named = |patch: &Value| patch["metadata"].as_object().is_some_and(|metadata| metadata.len() > 1);
    assert!(!patches.iter().any(named), "a patch names more than the version it is for: {patches:?}");
    drop(patches);
    // Nothing of the other VMI is reached through this launcher.
    assert!(stage.vmis.get("ns", OTHER).is_none_or(|handle| handle.launcher().is_err()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_connection_of_a_process_that_ends_before_hello_is_replaced() {
    let stage = Stage::new();
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let stranger = Peer::open(i32::try_from(child.id()).unwrap(), 107).unwrap();
    *stage.host.stranger.lock().unwrap() = Some(Arc::new(stranger));
    stage.host.serve(&stage.launcher);
    stage.vmis.apply(Arc::new(stage.records.put(&vmi("m", "u1"))));
    stage.until_event("SyncFailed").await;
    child.kill().unwrap();
    child.wait().unwrap();
    // The next connection leads to the launcher; this one fails, because its process is gone.
    let connected = async {
        while stage.host.stranger.lock().unwrap().take_if(|stranger| Arc::strong_count(stranger) == 1).is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, connected).await.expect("the connection to a process that is gone is kept");
    stage.until_phase(&Phase::Running).await;
}
