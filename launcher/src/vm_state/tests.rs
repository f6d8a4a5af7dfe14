use protocol::{Lifecycle, MigrationReport};
use serde_json::{Value, json};

use super::*;

fn vmi(domain: Value) -> VirtualMachineInstance {
    serde_json::from_value(json!({"metadata": {"name": "vm", "namespace": "ns"}, "spec": {"domain": domain}})).unwrap()
}

/// Files of a pod, with a claim for the state if `claim`.
fn pod(name: &str, claim: bool) -> Paths {
    let root = std::env::temp_dir().join(format!("launcher-vm-state-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&root);
    let paths = Paths {
        private: root.join("private"),
        runtime: root.join("run"),
        vm_state: root.join("private/vm-state"),
        ..Paths::default()
    };
    std::fs::create_dir_all(if claim { &paths.vm_state } else { &paths.private }).unwrap();
    std::fs::create_dir_all(paths.libvirt_runtime()).unwrap();
    paths
}

fn state(paths: &Paths) -> VmState {
    VmState { paths: paths.clone(), guest: paths.private.join("pid"), ending: Arc::default(), started: Arc::default() }
}

#[test]
fn a_uuid_has_the_form_of_libvirts_directories() {
    let uuid = Some("5d307ca9-b3ef-428c-8861-06e72d69f223".to_owned());
    for (text, expected) in [
        ("5d307ca9-b3ef-428c-8861-06e72d69f223", uuid.clone()),
        ("5D307CA9-B3EF-428C-8861-06E72D69F223", uuid.clone()),
        ("5d307ca9b3ef428c886106e72d69f223", uuid),
        ("../../../../../../../../../../etc", None),
        ("5d307ca9-b3ef-428c-8861-06e72d69f22", None),
        ("5d307ca9-b3ef-428c-8861-06e72d69f22ä", None),
        ("", None),
    ] {
        assert_eq!(canonical_uuid(text), expected, "{text}");
    }
}

#[test]
fn only_variables_that_persist_are_in_the_claim() {
    let paths = pod("variables", true);
    let efi = |efi: Value| vmi(json!({"devices": {}, "firmware": {"bootloader": {"efi": efi}}}));
    let kept = efi(json!({"persistent": true}));
    assert_eq!(VmState::variables(&kept, &paths), paths.vm_state.join("nvram/vm_VARS.fd"));
    assert_eq!(VmState::variables(&efi(json!({})), &paths), paths.nvram().join("vm_VARS.fd"));
    state(&paths).prepare(&kept, None).unwrap();
    let file = VmState::variables(&kept, &paths);
    // QEMU does not start with a file without content.
    for (content, is_kept) in [("", false), ("x", true)] {
        std::fs::write(&file, content).unwrap();
        state(&paths).prepare(&kept, None).unwrap();
        assert_eq!(file.exists(), is_kept);
    }
    let _ = std::fs::remove_dir_all(paths.private.parent().unwrap());
}

#[test]
fn state_that_persists_needs_a_claim_and_a_uuid() {
    let (without, with) = (pod("no-claim", false), pod("no-uuid", true));
    let tpm = |firmware: Value| vmi(json!({"devices": {"tpm": {"persistent": true}}, "firmware": firmware}));
    let known = tpm(json!({"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223"}));
    assert!(matches!(state(&without).prepare(&known, None), Err(VmStateError::NoClaim)));
    assert!(matches!(state(&with).prepare(&tpm(json!({})), None), Err(VmStateError::NoUuid)));
    assert!(matches!(state(&with).prepare(&tpm(json!({"uuid": "../x"})), None), Err(VmStateError::NoUuid)));
    for paths in [without, with] {
        let _ = std::fs::remove_dir_all(paths.private.parent().unwrap());
    }
}

#[test]
fn a_launcher_that_was_a_source_leaves_the_claim_to_the_next_start() {
    let report = |step: MigrationStep| {
        Some(MigrationReport { migration: "a".into(), step: step.into(), ..MigrationReport::default() })
    };
    let here = |arrived: Option<&str>| End::Here { arrived: arrived.map(str::to_owned) };
    for (migration, reason, expected) in [
        (None, "shutdown", here(None)),
        (None, "crashed", here(None)),
        (report(MigrationStep::Moved), "migrated", End::Left),
        (report(MigrationStep::Moved), "shutdown", here(Some("a"))),
        (report(MigrationStep::NotMoved), "shutdown", End::Unknown),
        (report(MigrationStep::Copying), "crashed", End::Unknown),
        (report(MigrationStep::Releasing), "", End::Unknown),
    ] {
        let state = LauncherState {
            migration,
            reason: reason.into(),
            lifecycle: Lifecycle::Shutoff.into(),
            ..LauncherState::default()
        };
        assert_eq!(End::of(&state), expected, "{state:?}");
    }
}

#[test]
fn a_target_without_its_guest_leaves_the_directories_of_the_source_alone() {
    const UUID: &str = "5d307ca9-b3ef-428c-8861-06e72d69f223";
    let here = |arrived: Option<&str>| End::Here { arrived: arrived.map(str::to_owned) };
    // The source has come by migration `a`, and this launcher prepares for `b`.
    for (end, expected) in [(here(None), ["a", "b"].as_slice()), (here(Some("a")), &["a", "b"]), (here(Some("b")), &[])]
    {
        let paths = pod("target", true);
        let states = paths.vm_state.join("swtpm");
        let of = |suffix: &str| states.join(format!("{UUID}.{suffix}"));
        for suffix in ["a", "b"] {
            std::fs::create_dir_all(of(suffix).join("tpm2")).unwrap();
            std::fs::write(of(suffix).join("tpm2/tpm2-00.permall"), suffix).unwrap();
        }
        std::fs::create_dir_all(paths.vm_state.join("meta")).unwrap();
        std::fs::write(paths.vm_state.join("meta/migrated"), "a").unwrap();
        std::os::unix::fs::symlink(of("b").join("tpm2"), paths.tpm_state()).unwrap();
        state(&paths).tidy_up(end.clone()).unwrap();
        let left: Vec<&str> = ["a", "b"].into_iter().filter(|suffix| of(suffix).exists()).collect();
        assert_eq!((left.as_slice(), states.join(UUID).exists()), (expected, expected.is_empty()), "{end:?}");
        let _ = std::fs::remove_dir_all(paths.private.parent().unwrap());
    }
}

#[test]
fn a_preparation_that_comes_late_leaves_the_tpm_of_a_running_guest_alone() {
    let paths = pod("late", true);
    let program = paths.private.join("qemu-test");
    std::fs::copy("/bin/sleep", &program).unwrap();
    let mut guest = std::process::Command::new(&program).arg("600").spawn().unwrap();
    let state = state(&paths);
    std::fs::write(&state.guest, guest.id().to_string()).unwrap();
    // The process gets its name after the program is loaded.
    while !emulator::is_qemu(&state.guest) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let kept = paths.vm_state.join("swtpm/5d307ca9-b3ef-428c-8861-06e72d69f223/tpm2");
    std::fs::create_dir_all(&kept).unwrap();
    let firmware = json!({"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223"});
    let vmi = vmi(json!({"devices": {"tpm": {"persistent": true}}, "firmware": firmware}));
    for migration in [None, Some("a")] {
        assert!(matches!(state.prepare(&vmi, migration), Err(VmStateError::Runs)), "{migration:?}");
    }
    guest.kill().unwrap();
    guest.wait().unwrap();
    assert!(kept.exists() && !emulator::is_qemu(&state.guest));
    let _ = std::fs::remove_dir_all(paths.private.parent().unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_does_not_answer_holds_one_thread() {
    let paths = pod("sync", false);
    let hangs = SYNCING.acquire().await.unwrap();
    let error = state(&paths).sync().await.unwrap_err();
    assert_eq!(error.to_string(), "the claim with the state of the VMI does not answer");
    // One that is only slow.
    let state = state(&paths);
    let ends = async {
        sleep(DEADLINE / 2).await;
        drop(hangs);
    };
    let ((), second) = tokio::join!(ends, state.sync());
    second.unwrap();
    let _ = std::fs::remove_dir_all(paths.private.parent().unwrap());
}
