//! Measures round trips of a console, from a line that a user types to its echo by the guest's terminal, while the guest rests and
//! while it migrates. A migration counts from its start to its end, as its status shows them.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Console, Story};
use serde_json::{Value, json};

use crate::{
    Figures,
    migration::{FILL, has},
    percentile,
    start::wait,
};

/// Migrations during which round trips are measured.
const MIGRATIONS: usize = 3;
/// Round trips while the guest rests.
const QUIET: usize = 100;
/// Time limit of one.
const TIMEOUT: Duration = Duration::from_secs(20);
const VM: &str = "
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: echo}
spec:
  runStrategy: Always
  template:
    spec:
      terminationGracePeriodSeconds: 0
      domain:
        memory: {guest: 512Mi}
        firmware:
          kernelBoot:
            kernelArgs: console=ttyS0 quiet
            container:
              image: ferrovirt.io/guests/tiny-kernel:devel
              imagePullPolicy: IfNotPresent
              kernelPath: /boot/vmlinuz
              initrdPath: /boot/initrd
        devices: {interfaces: [{name: default, masquerade: {}}]}
      networks: [{name: default, pod: {}}]
";

/// Measures both. Does nothing on one node.
pub(crate) async fn measure(story: &Story, figures: &mut Figures) -> Result<()> {
    if story.takers().await?.len() < 2 {
        println!("migrations need two nodes: round trips are not measured");
        return Ok(());
    }
    story.apply(VM).await?;
    story.wait_running("echo").await?;
    let mut lines = Lines { console: story.console("echo")?, count: 0 };
    lines.console.login("root", "ferrovirt").await?;
    lines.console.output(FILL).await?;
    let (mut quiet, mut moving, mut lost) = (Vec::new(), Vec::new(), 0.0);
    lines.begin().await?;
    for _ in 0..QUIET {
        quiet.push(lines.round_trip().await?);
    }
    for number in 0..MIGRATIONS {
        let phase = Cell::new(Phase::Before);
        let name = format!("echo-{number}");
        let ((times, failure), migrated) = tokio::join!(lines.round_trips(&phase), migrate(story, &name, &phase));
        migrated?;
        moving.extend(times);
        if let Some(error) = failure {
            println!("  the console was lost during migration {number}: {error:#}");
            lost += 1.0;
            lines.console = story.reopen_console("echo", "root", "ferrovirt").await?;
            lines.begin().await?;
        }
    }
    for (name, percent, values) in [
        ("console_round_trip_quiet_ms", 50, &quiet),
        ("console_round_trip_quiet_p99_ms", 99, &quiet),
        ("console_round_trip_migrating_ms", 50, &moving),
        ("console_round_trip_migrating_max_ms", 100, &moving),
    ] {
        figures.insert(name.into(), percentile(values, percent).context("no round trip")?);
    }
    figures.insert("console_lost_migrations".into(), lost);
    story.delete("vm", "echo").await?;
    story.wait_gone("vmi", "echo", Duration::from_secs(120)).await
}

/// State of a migration.
#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Before,
    Moving,
    Over,
}

/// Migrates the guest and shows the phase.
async fn migrate(story: &Story, name: &str, phase: &Cell<Phase>) -> Result<()> {
    let migration = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceMigration", "metadata": {"name": name},
        "spec": {"vmiName": "echo"},
    });
    let result = async {
        story.apply(&migration.to_string()).await?;
        let uid = story.get("vmim", name).await?["metadata"]["uid"].clone();
        wait(story.api("vmi"), "echo", has(&uid, "startTimestamp")).await.context("the migration does not begin")?;
        phase.set(Phase::Moving);
        wait(story.api("vmi"), "echo", has(&uid, "endTimestamp")).await.context("the migration does not end")
    };
    let result = result.await;
    phase.set(Phase::Over);
    result?;
    let ended = |vmim: &Value| ["Succeeded", "Failed"].contains(&vmim["status"]["phase"].as_str().unwrap_or_default());
    let end = story.wait("vmim", name, "end", Duration::from_secs(60), ended).await?;
    ensure!(end["status"]["phase"] == "Succeeded", "{}", end["status"]);
    Ok(())
}

/// Numbered lines on a console.
struct Lines {
    console: Console,
    count: u32,
}

impl Lines {
    /// Starts a program that reads lines. The terminal repeats them, not a shell.
    async fn begin(&mut self) -> Result<()> {
        self.console.send("cat >/dev/null\n").await?;
        self.round_trip().await.map(drop)
    }

    /// Returns the milliseconds until the next line is shown.
    async fn round_trip(&mut self) -> Result<f64> {
        self.count += 1;
        let line = format!("line-{}", self.count);
        let sent = Instant::now();
        self.console.send(&format!("{line}\n")).await?;
        self.console.expect(&format!("{line}\r\n"), TIMEOUT).await?;
        Ok(sent.elapsed().as_secs_f64() * 1000.0)
    }

    /// Returns the round trips that began during the migration, and the error if the console was lost.
    async fn round_trips(&mut self, phase: &Cell<Phase>) -> (Vec<f64>, Option<anyhow::Error>) {
        let mut times = Vec::new();
        while phase.get() != Phase::Over {
            let counts = phase.get() == Phase::Moving;
            match self.round_trip().await {
                Ok(time) if counts => times.push(time),
                Ok(_) => {}
                Err(error) => return (times, Some(error)),
            }
        }
        (times, None)
    }
}
