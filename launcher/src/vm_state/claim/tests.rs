use std::fs;

use super::*;

const UUID: &str = "5d307ca9-b3ef-428c-8861-06e72d69f223";

fn named(names: &[&str]) -> Vec<(String, bool)> {
    names.iter().map(|name| (format!("{UUID}{name}"), true)).collect()
}

fn apply(entries: &mut Vec<(String, bool)>, step: &Step) {
    match step {
        Step::Remove(name) => entries.retain(|(entry, _)| entry != name),
        Step::Rename { from, to } => {
            assert!(!entries.iter().any(|(entry, _)| entry == to), "{to} exists");
            entries.iter_mut().filter(|(entry, _)| entry == from).for_each(|(entry, _)| entry.clone_from(to));
        }
    }
}

#[test]
fn a_start_finds_the_state_after_any_step_of_an_earlier_one() {
    for (names, marker, current) in [
        (&[""][..], "", Some("")),
        (&["", ".new"], "", Some("")),
        (&[".new"], "", None),
        (&[], "a", None),
        (&[".b"], "a", None),
        (&["", ".a"], "a", Some(".a")),
        // The migration has failed: the guest never ran at the target.
        (&["", ".a"], "", Some("")),
        (&["", ".b"], "a", Some("")),
        (&["", ".a", ".b"], "a", Some(".a")),
        (&[".a", ".b"], "b", Some(".b")),
        // The source has removed its own, or the target found none in its claim.
        (&[".a"], "a", Some(".a")),
        (&[""], "a", Some("")),
    ] {
        let current = current.map(|name| format!("{UUID}{name}"));
        let first = steps(UUID, marker, &named(names));
        for done in 0..=first.len() {
            let mut entries = named(names);
            first.iter().take(done).for_each(|step| apply(&mut entries, step));
            // The state that was current is there under its name, or under its last one.
            let lives = |entries: &[(String, bool)]| {
                current.as_ref().is_none_or(|current| entries.iter().any(|(name, _)| name == current || name == UUID))
            };
            assert!(lives(&entries), "{names:?} {marker} after {done}");
            for step in steps(UUID, marker, &entries) {
                assert_ne!(step, Step::Remove(current.clone().unwrap_or_default()), "{names:?} {marker} after {done}");
                apply(&mut entries, &step);
                assert!(lives(&entries), "{names:?} {marker} after {done}: {step:?}");
            }
            // Nothing is removed while there is no state.
            let expected: &[&str] = if current.is_some() { &[""] } else { names };
            assert_eq!(entries, named(expected), "{names:?} {marker} after {done}");
        }
    }
    // Without a state in it, no directory counts as moved; those of other TPMs stay.
    let empty = vec![(UUID.to_owned(), true), (format!("{UUID}.a"), false), ("other".to_owned(), true)];
    assert_eq!(steps(UUID, "a", &empty), [Step::Remove(format!("{UUID}.a"))]);
}

struct Scratch(StateClaim);

impl Scratch {
    fn new(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("launcher-state-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).unwrap();
        Self(StateClaim { directory })
    }

    /// Writes a state as swtpm does.
    fn write(&self, directory: &Path, content: &str) {
        assert!(directory.starts_with(&self.0.directory));
        fs::write(directory.join(PERMANENT), content).unwrap();
    }

    fn read(&self, directory: &Path) -> String {
        fs::read_to_string(directory.join(PERMANENT)).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0.directory);
    }
}

#[test]
fn a_tpm_is_made_once_and_whole() {
    let scratch = Scratch::new("made");
    let claim = &scratch.0;
    let failed: Result<()> = claim.make_tpm(UUID, |directory| {
        scratch.write(directory, "half");
        Err(std::io::Error::other("interrupted"))
    });
    assert!(failed.is_err() && !has_state(&claim.settle(UUID).unwrap()).unwrap());
    for (content, expected) in [("first", "first"), ("second", "first")] {
        claim
            .make_tpm(UUID, |directory| -> Result<()> {
                scratch.write(directory, content);
                Ok(())
            })
            .unwrap();
        assert_eq!(scratch.read(&claim.settle(UUID).unwrap()), expected);
    }
}

#[test]
fn a_shared_claim_has_a_directory_for_each_end_of_a_migration() {
    let scratch = Scratch::new("shared");
    let claim = &scratch.0;
    let mut own = claim.settle(UUID).unwrap();
    claim
        .make_tpm(UUID, |directory| -> Result<()> {
            scratch.write(directory, "0");
            Ok(())
        })
        .unwrap();
    for (number, migration) in ["a", "b", "c"].into_iter().enumerate() {
        // The first attempt fails.
        let failed = claim.arrive(UUID, "failed").unwrap();
        assert_ne!(failed, own);
        let target = claim.arrive(UUID, migration).unwrap();
        assert_ne!(target, own);
        let content = (number + 1).to_string();
        assert!(!claim.has_state_of(&own, migration).unwrap(), "{migration} has not brought it yet");
        scratch.write(&target, &content);
        for end in [&own, &target] {
            assert!(claim.has_state_of(end, migration).unwrap(), "{migration}");
        }
        claim.mark(migration).unwrap();
        claim.leave(&own).unwrap();
        assert!(!own.exists(), "{migration}");
        own = target;
    }
    let settled = claim.settle(UUID).unwrap();
    assert_eq!(scratch.read(&settled), "3");
    assert_eq!(claim.entries().unwrap(), [(UUID.to_owned(), true)]);
}

#[test]
fn a_claim_of_its_own_has_the_state_where_the_next_start_looks() {
    let (source, target) = (Scratch::new("source"), Scratch::new("target"));
    source.0.settle(UUID).unwrap();
    source
        .0
        .make_tpm(UUID, |directory| -> Result<()> {
            source.write(directory, "x");
            Ok(())
        })
        .unwrap();
    let arrived = target.0.arrive(UUID, "a").unwrap();
    assert_eq!(target.0.arrive(UUID, "a").unwrap(), arrived, "a repeated request");
    target.write(&arrived, "x");
    source.0.mark("a").unwrap();
    assert_eq!(source.0.marker().unwrap(), "a");
    let own = source.0.tpm(UUID);
    source.0.leave(&own).unwrap();
    assert!(has_state(&own).unwrap(), "the source's claim is whole until the hand-off");
    assert!(!source.0.has_state_of(&own, "a").unwrap() && !target.0.has_state_of(&arrived, "a").unwrap());
    assert_eq!(target.0.settle(UUID).unwrap(), arrived);
}

#[test]
fn the_state_that_ran_is_kept_without_its_marker() {
    for (name, expected) in [(format!("{UUID}.a"), "moved"), (UUID.to_owned(), "own")] {
        let scratch = Scratch::new("kept");
        let claim = &scratch.0;
        for (directory, content) in [(UUID.to_owned(), "own"), (format!("{UUID}.a"), "moved")] {
            make_directory(&claim.tpm(&directory)).unwrap();
            scratch.write(&claim.tpm(&directory), content);
        }
        claim.keep(UUID, &name).unwrap();
        assert_eq!(claim.entries().unwrap(), [(UUID.to_owned(), true)]);
        assert_eq!(scratch.read(&claim.tpm(UUID)), expected);
    }
}

#[test]
fn a_marker_or_state_that_cannot_be_read_is_not_missing() {
    // A name that is too long stands for storage that fails: root can read everything else.
    let claim = StateClaim { directory: std::env::temp_dir().join("x".repeat(300)) };
    assert!(claim.marker().is_err() && claim.settle(UUID).is_err() && has_state(&claim.directory).is_err());
}

#[test]
fn content_of_a_claim_leads_nowhere_else() {
    let scratch = Scratch::new("hostile");
    let claim = &scratch.0;
    let outside = Scratch::new("outside");
    fs::write(outside.0.directory.join("kept"), "x").unwrap();
    make_directory(&claim.directory.join(META)).unwrap();
    for text in ["../..", "a/b", "", "..", &"x".repeat(1000)] {
        fs::write(claim.directory.join(META).join(MIGRATED), text).unwrap();
        assert_eq!(claim.marker().unwrap(), "", "{text}");
    }
    let own = claim.settle(UUID).unwrap();
    std::os::unix::fs::symlink(&outside.0.directory, claim.directory.join(SWTPM).join(format!("{UUID}.a"))).unwrap();
    claim.mark("a").unwrap();
    assert_eq!(claim.settle(UUID).unwrap(), own);
    claim.leave(&own).unwrap();
    assert!(outside.0.directory.join("kept").exists());
}
