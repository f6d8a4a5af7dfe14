//! The comparison of images before a migration.

use std::path::Path;

use protocol::{Lifecycle, MigrateRequest, MigrationStep};

use super::{
    Table,
    migration_source::{NOT_MOVED, migrate, options, report, shown},
    read, to_out,
};
use crate::engine::model::{Action, JobInput, Request, Stage};

#[test]
fn disks_are_copied_only_over_equal_images() {
    let compared = |migration: &str, result: Result<(), &str>| {
        let result = result.map_err(str::to_owned);
        to_out(JobInput::ImagesCompared { migration: migration.into(), result })
    };
    let comparing = || {
        let mut table = Table::live();
        // The image beneath the disk `root` is `/images/disk.img`.
        table.state.base.container_disks = Path::new("/").into();
        let request = MigrateRequest { copied_volumes: vec!["root".into()], ..options("a") };
        assert_eq!(migrate(&mut table, request), ["open migration"]);
        assert_eq!(table.take(to_out(JobInput::MigrationOpened(Ok(())))), ["compare images"]);
        assert_eq!((table.last_answer(), shown(&table).0), (Some(Ok(false)), MigrationStep::Copying));
        assert!(report(&table).total > 1, "virt-handler shows it as alive");
        assert_eq!(table.after(5), [""; 0]);
        assert_eq!(table.take(compared("of before", Ok(()))), [""; 0]);
        table
    };
    let mut table = comparing();
    // A restarted worker counts the limits from here.
    assert_eq!(table.take(compared("a", Ok(()))), ["save migration", "await departure", "set downtime", "migrate"]);
    assert_eq!(table.take(compared("a", Err("late"))), [""; 0]);
    // The guest runs on.
    let mut table = comparing();
    assert_eq!(table.take(compared("a", Err("they differ"))), ["save migration"]);
    assert_eq!(shown(&table), (NOT_MOVED, "they differ".into(), false));
    assert_eq!((table.state.base.stage, table.state.job.is_none()), (Stage::Live, true));
    let mut table = comparing();
    assert_eq!(table.request(Request::AbortMigration("a".into())), ["save migration"]);
    assert_eq!(shown(&table), (NOT_MOVED, "Live migration has been aborted".into(), true));
    assert_eq!(table.take(compared("a", Ok(()))), [""; 0]);
    assert_eq!(table.after(1), [""; 0], "there is no job to abort");
    // The guest ends.
    let mut table = comparing();
    assert_eq!(table.act(Action::Kill), ["save migration", "destroy gently"]);
    assert!(shown(&table).2 && table.state.job.is_none());
    let mut table = comparing();
    assert!(table.take(read(Lifecycle::Shutoff, "shutdown")).contains(&"save migration".to_owned()));
    assert_eq!((shown(&table).0, table.state.base.stage), (NOT_MOVED, Stage::Ended));
    assert!(table.state.job.is_none());
}
