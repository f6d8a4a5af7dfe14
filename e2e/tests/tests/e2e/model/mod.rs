//! Random sequences of what users do with VMs, snapshots, restores and clones, compared with a model after each step.
//!
//! ```text
//! seed ── generate (actions.rs) ── play (play.rs) in a World: the test cluster (cluster.rs), or a fake (fake.rs)
//!                                    │ a step fails
//!                                    └── shrink: fewer steps, each attempt in a new namespace ── the steps that remain
//! ```
//! `KILLS=7` runs the whole sequence of seed 7, `KILLS=all` those of all seeds, and otherwise a run has the begin of one. A failure is
//! printed at once, and at the end with the steps that remain. `MODEL_STEPS` and `MODEL_ATTEMPTS` change the number of steps and of
//! attempts to reduce them, `MODEL_ATTEMPTS=0` for none.

mod actions;
mod cluster;
mod fake;
mod play;

use std::fmt::{self, Display};

use anyhow::{Context, Result, bail};
use ferrovirt_e2e_tests::{Story, storage::delete_vmis, story_alone};
use tokio::time::Instant;

use self::{
    actions::{Step, generate},
    cluster::Cluster,
    play::{failed_at, play, shrink},
};
use crate::{
    data_volumes::{MINUTES, new_namespace, remove, with_driver},
    rows::chosen,
};

/// Seeds; a sample has one.
const SEEDS: u64 = 20;
/// Steps of a seed, and attempts to reduce those of a failure, each of which takes minutes.
const WHOLE: (usize, usize) = (50, 12);
/// The same in a sample.
const SAMPLE: (usize, usize) = (12, 4);

struct Seed(u64);

impl Display for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}", self.0)
    }
}

#[test]
fn actions_and_kills_in_any_order_leave_what_the_model_says() {
    story_alone("model", async |s| {
        with_driver(s, async |s| {
            let (steps, attempts) = if std::env::var_os("KILLS").is_some() { WHOLE } else { SAMPLE };
            let (steps, attempts) = (number("MODEL_STEPS", steps)?, number("MODEL_ATTEMPTS", attempts)?);
            for seed in chosen((0..SEEDS).map(Seed).collect(), 20)? {
                let begun = Instant::now();
                run(s, &seed, generate(seed.0, steps), attempts).await?;
                eprintln!("{seed}: {steps} steps in {:.0?}", begun.elapsed());
            }
            Ok(())
        })
        .await
    });
}

/// Returns the number in an environment variable.
fn number(variable: &str, default: usize) -> Result<usize> {
    match std::env::var(variable) {
        Ok(text) => text.parse().with_context(|| format!("{variable} is {text:?}")),
        Err(_) => Ok(default),
    }
}

/// Plays the steps of a seed. If they fail, reports as few of them as fail as well.
async fn run(s: &Story, seed: &Seed, steps: Vec<Step>, most: usize) -> Result<()> {
    let Err(error) = attempt(s, &format!("{}", seed.0), &steps, true).await else { return Ok(()) };
    eprintln!("{seed} has failed: {error:#}");
    let begin = steps[..failed_at(&error).map_or(steps.len(), |at| at + 1)].to_vec();
    let mut last = error;
    let mut attempts = 0;
    let reduced = shrink(begin, most, async |steps: &[Step]| {
        attempts += 1;
        let outcome = attempt(s, &format!("{}-{attempts}", seed.0), steps, false).await;
        eprintln!("{seed}, attempt {attempts} with {} steps: {outcome:?}", steps.len());
        let has_failed = outcome.is_err();
        outcome.err().into_iter().for_each(|error| last = error);
        Ok(has_failed)
    });
    let reduced = reduced.await?;
    let shown: Vec<String> = reduced.iter().map(ToString::to_string).collect();
    bail!("{seed} fails with these steps:\n{}\n{last:#}", shown.join("\n"))
}

/// Plays steps in a namespace of their own, and removes everything in it.
async fn attempt(s: &Story, name: &str, steps: &[Step], explains: bool) -> Result<()> {
    let own = new_namespace(s, format!("{}-{name}", s.namespace), "model").await?;
    let outcome = play(&mut Cluster::new(&own), steps).await;
    if let Some(error) = outcome.as_ref().err().filter(|_| explains) {
        own.explain(error).await;
    }
    let cleared = clear(&own).await;
    s.cluster_api("Namespace").delete(&own.namespace, &Default::default()).await?;
    outcome.and(cleared)
}

async fn clear(s: &Story) -> Result<()> {
    for kind in ["VirtualMachineClone", "VirtualMachineRestore", "VirtualMachineSnapshot"] {
        for object in s.list(kind, "").await? {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            match s.api(kind).delete(name, &Default::default()).await {
                // Those of a clone go with it.
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                outcome => drop(outcome.with_context(|| format!("delete {kind} {name}"))?),
            }
            s.wait_gone(kind, name, MINUTES).await?;
        }
    }
    delete_vmis(s).await?;
    remove(s).await
}
