//! Mistakes that people make, each with the answer that helps them, where they look for it.
//!
//! `rows.yaml` has the list. An answer is worth two points if it is sufficient, one if it is half of one or has to be searched, and
//! none if it is missing or wrong, which fails the story.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, story};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::{manifests, moves, networks};

const ROWS: &str = include_str!("rows.yaml");
/// Pause between looks, which are commands.
const PAUSE: Duration = Duration::from_secs(1);
/// Time limit for the answers: on one node, a kubelet without DNS gives up on two images, one after the other.
const PATIENCE: Duration = Duration::from_secs(360);
/// More than the user data that fits in a VM.
const MUCH: usize = 2100;
/// Row that needs secondary networks.
const NETWORK: &str = "nowhere";

/// A mistake and its answer.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    /// Number in the list of mistakes. Rows without one are not counted.
    row: Option<u8>,
    mistake: String,
    /// Merge patch of the VM that is applied.
    #[serde(default)]
    vm: Value,
    /// Merge patch of the spec of its template.
    #[serde(default)]
    template: Value,
    /// Commands. Without any, the VM is applied.
    #[serde(default)]
    run: Vec<String>,
    /// Texts in the output of each command.
    #[serde(default)]
    output: Vec<String>,
    /// Texts that mislead.
    #[serde(default)]
    without: Vec<String>,
    /// The commands succeed, as they do before the person looks elsewhere.
    #[serde(default)]
    accepted: bool,
    /// Commands with which the person looks, with the texts that they show in the end.
    #[serde(default)]
    sees: BTreeMap<String, Vec<String>>,
    /// Command that ends the mistake.
    then: Option<String>,
    /// Reason for one point.
    half: Option<String>,
}

impl Row {
    fn name(&self) -> String {
        self.row.map_or_else(|| "m".to_owned(), |row| format!("m{row}"))
    }

    fn points(&self) -> u32 {
        if self.half.is_some() { 1 } else { 2 }
    }

    /// Returns true if a line has one of the texts.
    fn is_answer(&self, line: &str) -> bool {
        self.output.iter().chain(self.sees.values().flatten()).any(|text| line.contains(text))
    }

    /// Returns the VM with the mistake.
    fn manifest(&self, run_strategy: &str) -> Result<String> {
        let mut vm: Value = serde_saphyr::from_str(&moves::vm(&self.name(), run_strategy))?;
        if !self.template.is_null() {
            json_patch::merge(&mut vm["spec"]["template"]["spec"], &self.template);
        }
        if !self.vm.is_null() {
            json_patch::merge(&mut vm, &self.vm);
        }
        Ok(vm.to_string().replace("$MUCH", &"#".repeat(MUCH)))
    }

    /// Makes the mistake. Returns the output, and the texts that it lacks.
    async fn make(&self, s: &Story, run_strategy: &str) -> Result<(String, Vec<String>)> {
        let apply = vec!["kubectl apply -f -".to_owned()];
        let (commands, manifest) = match self.run.as_slice() {
            [] => (apply.as_slice(), self.manifest(run_strategy)?),
            commands => (commands, String::new()),
        };
        let is_accepted = self.accepted || !self.sees.is_empty();
        let (mut printed, mut lacks) = (String::new(), Vec::new());
        for command in commands {
            let (succeeded, output) = s.command_line(command, &manifest).await?;
            if succeeded != is_accepted {
                lacks.push(format!("{command}: {}", if is_accepted { "success" } else { "a failure" }));
            }
            lacks.extend(missing(&output, &self.output).map(|text| format!("{command}: {text}")));
            lacks.extend(self.without.iter().filter(|text| output.contains(*text)).map(|text| format!("no {text}")));
            if repeats_a_field(&output) {
                lacks.push(format!("{command}: each field once"));
            }
            printed.push_str(&output);
        }
        Ok((printed, lacks))
    }

    /// Looks until all texts are seen. Returns what is seen, and the texts that it lacks.
    async fn look(&self, s: &Story, deadline: Instant) -> Result<(String, Vec<String>)> {
        let (mut printed, mut lacks) = (String::new(), Vec::new());
        for (command, texts) in &self.sees {
            loop {
                let (_, output) = s.command_line(command, "").await?;
                let output = status(command, &output);
                let left: Vec<String> = missing(output, texts).map(|text| format!("{command}: {text}")).collect();
                if left.is_empty() || Instant::now() > deadline {
                    printed.push_str(output);
                    lacks.extend(left);
                    break;
                }
                sleep(PAUSE).await;
            }
        }
        Ok((printed, lacks))
    }
}

/// Returns the texts that an output lacks.
fn missing<'a>(output: &str, texts: &'a [String]) -> impl Iterator<Item = &'a str> {
    texts.iter().map(String::as_str).filter(move |text| !output.contains(text))
}

/// Returns true if a line has an empty field before its message, or the field in the message again.
fn repeats_a_field(output: &str) -> bool {
    let again = |pair: &[&str]| pair[0].contains('.') && pair[1].starts_with(pair[0]);
    let repeats = |line: &str| line.trim_start_matches("* ").split(": ").collect::<Vec<_>>().windows(2).any(again);
    output.contains(": : ") || output.lines().any(repeats)
}

/// Returns the part of an output that is an answer: a description begins with what the person wrote.
fn status<'a>(command: &str, output: &'a str) -> &'a str {
    let begin = if command.starts_with("kubectl describe") { output.find("\nStatus:") } else { None };
    &output[begin.unwrap_or_default()..]
}

fn rows(group: &str) -> Result<Vec<Row>> {
    let mut groups: BTreeMap<String, Vec<Row>> = serde_saphyr::from_str(ROWS).context("rows.yaml")?;
    groups.remove(group).with_context(|| format!("rows.yaml has no group {group}"))
}

/// Makes all mistakes, then looks for the answers of each, and prints a table. Returns the answers that do not help.
async fn check(s: &Story, rows: &[Row], run_strategy: &str) -> Result<Vec<String>> {
    let mut made = Vec::new();
    for row in rows {
        made.push(row.make(s, run_strategy).await.with_context(|| row.mistake.clone())?);
    }
    let (mut wrong, deadline) = (Vec::new(), Instant::now() + PATIENCE);
    for (row, (output, mut lacks)) in rows.iter().zip(made) {
        let (seen, left) = row.look(s, deadline).await?;
        lacks.extend(left);
        if let Some(command) = &row.then {
            let (succeeded, output) = s.command_line(command, "").await?;
            lacks.extend((!succeeded).then(|| format!("{command}: {output}")));
        }
        let points = if lacks.is_empty() { row.points() } else { 0 };
        let number = row.row.map_or_else(|| "-".to_owned(), |row| row.to_string());
        let shown = output + &seen;
        eprintln!("{number:>2} {points} {}", row.mistake);
        shown.lines().filter(|line| row.is_answer(line)).for_each(|line| eprintln!("     {}", line.trim()));
        if points == 0 {
            wrong.push(format!("{number} {}: {lacks:?} not in:\n{shown}", row.mistake));
        }
    }
    Ok(wrong)
}

fn ensure_none(wrong: &[String]) -> Result<()> {
    ensure!(wrong.is_empty(), "answers that do not help:\n{}", wrong.join("\n"));
    Ok(())
}

#[test]
fn wrong_manifests_are_refused_or_warned_of_with_what_is_right() {
    story("mistakes-refused", async |s| {
        s.apply(
            "
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachineInstancetype
metadata: {name: small}
spec: {cpu: {guest: 1}, memory: {guest: 128Mi}}
",
        )
        .await?;
        ensure_none(&check(s, &rows("refused")?, "Halted").await?)
    });
}

#[test]
fn commands_that_cannot_be_done_say_why() {
    story("mistakes-stopped", async |s| {
        s.apply(&manifests::kernel_vm("stopped", "Halted")).await?;
        let is_stopped = |vm: &Value| vm["status"]["printableStatus"] == "Stopped";
        s.wait("vm", "stopped", "be Stopped", TIMEOUT, is_stopped).await?;
        ensure_none(&check(s, &rows("stopped")?, "Halted").await?)
    });
}

#[test]
fn vm_that_does_not_start_says_why() {
    story("mistakes-starting", async |s| {
        // Larger than what any other row requests.
        s.apply("{apiVersion: v1, kind: ResourceQuota, metadata: {name: small}, spec: {hard: {requests.memory: 2Ti}}}")
            .await?;
        let used = |quota: &Value| quota["status"]["hard"].is_object();
        s.wait("ResourceQuota", "small", "be in force", TIMEOUT, used).await?;
        let mut rows = rows("starting")?;
        if !networks::are_there(s).await? {
            ferrovirt_e2e_tests::skip("Multus")?;
            rows.retain(|row| !row.template.to_string().contains(NETWORK));
        }
        ensure_none(&check(s, &rows, "Always").await?)
    });
}

#[test]
fn running_vm_says_which_change_it_does_not_follow() {
    story("mistakes-running", async |s| {
        let (_, hostname) = s.one_node().await?;
        let manifest = moves::with_spec(
            &moves::vm("running", "Always")
                .replace("memory: {guest: 128Mi}", "cpu: {sockets: 1, maxSockets: 2}\n        memory: {guest: 1Gi}"),
            &format!("nodeSelector: {{kubernetes.io/hostname: {hostname}}}"),
        );
        s.apply(&manifest).await?;
        s.wait_running("running").await?;
        moves::console(s, "running").await?.leave().await?;
        // Some rows depend on the former one.
        let mut wrong = Vec::new();
        for row in rows("running")? {
            wrong.extend(check(s, &[row], "Always").await?);
        }
        ensure_none(&wrong)
    });
}

#[test]
fn vm_with_a_bridge_refuses_to_migrate_and_ends_with_its_namespace() {
    story("mistakes-ending", async |s| {
        let ending = Story::of(s.client.clone(), format!("{}-x", s.namespace));
        let labels = json!({"ferrovirt.io/e2e": "mistakes-ending"});
        let object =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": ending.namespace, "labels": labels}});
        s.cluster_api("Namespace").create(&Default::default(), &serde_json::from_value(object)?).await?;
        let outcome = async {
            ending.apply(&manifests::kernel_vm("bridged", "Always")).await?;
            ending.wait_running("bridged").await?;
            let shown = |vmi: &Value| vmi["status"]["conditions"].to_string().contains("LiveMigratable");
            ending.wait("vmi", "bridged", "show if it is migratable", TIMEOUT, shown).await?;
            ensure_none(&check(&ending, &rows("ending")?, "Always").await?)
        };
        let outcome = outcome.await;
        s.cluster_api("Namespace").delete(&ending.namespace, &Default::default()).await.ok();
        outcome
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_is_complete_and_its_answers_are_worth_100_points() {
        let groups: BTreeMap<String, Vec<Row>> = serde_saphyr::from_str(ROWS).unwrap();
        let rows: Vec<Row> = groups.into_values().flatten().collect();
        let mut numbers: Vec<u8> = rows.iter().filter_map(|row| row.row).collect();
        numbers.sort_unstable();
        assert!(numbers.iter().copied().eq(1..=55), "{numbers:?}");
        let points: u32 = rows.iter().filter(|row| row.row.is_some()).map(Row::points).sum();
        assert!(points >= 100, "{points} of 110");
        let silent: Vec<&str> = rows
            .iter()
            .filter(|row| row.output.is_empty() && row.sees.values().all(Vec::is_empty))
            .map(|row| row.mistake.as_str())
            .collect();
        assert!(silent.is_empty(), "rows without a text: {silent:?}");
    }

    #[test]
    fn repeated_fields_are_found() {
        for (line, expected) in [
            ("The request is invalid: spec.a.tpm: spec.a.tpm is not supported", true),
            ("The request is invalid: \n* spec.a.tpm: spec.a.tpm is not supported", true),
            ("The request is invalid: : spec.a in body must be of type integer", true),
            ("The request is invalid: spec.a.tpm: is not supported", false),
            ("The request is invalid: spec.a[1].name: spec.a[1] and spec.a[0] must differ", false),
        ] {
            assert_eq!(repeats_a_field(line), expected, "{line}");
        }
    }

    #[test]
    fn answers_are_not_read_from_the_spec() {
        let described = "Spec:\n  Name:  seed\nStatus:\n  Message:  none\n";
        assert_eq!(status("kubectl describe vm m", described), "\nStatus:\n  Message:  none\n");
        assert_eq!(status("kubectl get vm m", described), described);
        let texts = ["none".to_owned(), "seed".to_owned()];
        assert!(missing(status("kubectl describe vm m", described), &texts).eq(["seed"]));
    }
}
