//! Figures: comparisons, targets, output, and percentiles.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use ferrovirt_e2e_tests::repository;

/// Measured values by name. Names contain the unit.
pub(crate) type Figures = BTreeMap<String, f64>;

/// Targets of figures.
const TARGETS: [(&str, f64); 37] = [
    ("vmi_running_over_pod", 1.5),
    ("vmi_ready_after_running_s", 0.05),
    ("pod_status_patch_over_without_policies", 1.03),
    ("delete_less_pod_delete_s", 0.5),
    ("restart_less_stop_and_start_s", 0.3),
    ("restart_less_full_stop_and_start_s", 0.3),
    ("volume_in_guest_over_pod_with_claim", 2.0),
    ("import_registry_over_convert", 1.3),
    ("import_http_over_wget", 1.5),
    ("vm_with_clone_over_claim", 1.5),
    // The snapshot of the storage lies within the freeze, so that the ratio to freeze and thaw alone has no target.
    ("snapshot_stall_over_freeze_snapshot_and_thaw", 1.3),
    ("hibernate_over_plain_save", 1.3),
    ("resume_memory_over_plain_restore", 1.3),
    ("import_pod_rss_mib", 64.0),
    ("outside_qemu_pss_mib", 20.5),
    ("outside_qemu_private_mib", 5.0),
    ("overhead_mib", 120.0),
    ("overhead_used_over_requested", 1.0),
    ("soak_used_over_requested", 1.0),
    ("soak_cgroup_over_requested", 1.0),
    ("start_with_state_over_without", 1.2),
    ("swtpm_pss_mib", 5.0),
    ("virtiofsd_pss_mib", 6.0),
    ("launcher_supervisor_pss_mib", 3.0),
    ("virt_api_rss_mib", 23.8),
    ("virt_controller_rss_mib", 23.8),
    ("virt_handler_rss_mib", 19.1),
    ("webhook_p99_ms", 10.0),
    ("migration_over_plain", 1.3),
    ("migration_begin_over_pod", 1.5),
    ("migration_blackout_over_plain", 2.0),
    ("portforward_direct_over_forwarded", 1.25),
    ("channel_1ms_time_over_before", 0.5),
    ("channel_cpu_over_before", 0.85),
    ("migration_max_over_median", 3.0),
    ("console_round_trip_migrating_over_quiet", 1.3),
    ("leader_killed_to_write_s", 9.0),
];

/// Targets of figures of `--scale`. `#` stands for a number.
const SCALE_TARGETS: [(&str, f64); 5] = [
    ("vms_#_p50_over_pods", 1.5),
    ("controller_rss_kib_per_vm", 20.0),
    ("change_cost_ratio", 1.5),
    ("leader_killed_to_write_at_#_s", 9.0),
    ("writes_at_rest", 0.0),
];

/// Adds the figures that compare others with a floor of the same run.
pub(crate) fn compare(figures: &mut Figures) {
    let get = |name: &str| figures.get(name).copied();
    let ratio = |a: &str, b: &str| Some(get(a)? / get(b)?);
    let sum = |a: &str, b: &str| Some(get(a)? + get(b)?);
    let stall_floor = sum("freeze_and_thaw_stall_s", "csi_snapshot_s");
    let restart_less = |stop: &str| Some(get("restart_s")? - get(stop)? - get("start_s")?);
    let compared = [
        ("vmi_running_over_pod", ratio("vmi_running_s", "pod_running_s")),
        ("vmi_running_over_pod_without_volumes", ratio("vmi_running_s", "pod_without_volumes_running_s")),
        ("cold_vmi_running_over_pod", ratio("cold_vmi_running_s", "cold_pod_running_s")),
        ("vmi_ready_over_pod", ratio("vmi_ready_s", "pod_running_s")),
        ("ten_vmis_over_ten_pods", ratio("ten_vmis_running_s", "ten_pods_running_s")),
        ("delete_less_pod_delete_s", get("delete_s").zip(get("pod_delete_s")).map(|(vmi, pod)| vmi - pod)),
        ("restart_less_stop_and_start_s", restart_less("stop_s")),
        ("restart_less_full_stop_and_start_s", restart_less("stop_until_startable_s")),
        ("stop_by_acpi_less_stop_s", get("stop_by_acpi_s").zip(get("stop_s")).map(|(acpi, kill)| acpi - kill)),
        ("volume_in_guest_over_pod_with_claim", ratio("volume_in_guest_s", "pod_with_claim_running_s")),
        ("start_with_state_over_without", ratio("start_with_state_s", "start_without_state_s")),
        ("import_registry_over_convert", ratio("import_registry_s", "convert_s")),
        ("import_http_over_wget", ratio("import_http_s", "wget_s")),
        ("vm_with_clone_over_claim", ratio("vm_with_clone_running_s", "vm_with_claim_running_s")),
        ("snapshot_stall_over_freeze_and_thaw", ratio("snapshot_stall_s", "freeze_and_thaw_stall_s")),
        (
            "snapshot_stall_over_freeze_snapshot_and_thaw",
            get("snapshot_stall_s").zip(stall_floor).map(|(stall, floor)| stall / floor),
        ),
        ("hibernate_over_plain_save", ratio("hibernate_save_s", "plain_save_s")),
        ("resume_memory_over_plain_restore", ratio("resume_memory_s", "plain_restore_s")),
        ("resume_over_start_and_plain_restore", ratio("resume_s", "start_and_plain_restore_s")),
        ("pool_up_over_replica_set", ratio("pool_up_per_s", "replica_set_up_per_s")),
        ("pool_down_over_replica_set", ratio("pool_down_per_s", "replica_set_down_per_s")),
        ("portforward_over_kubectl", ratio("portforward_mib_s", "portforward_pod_mib_s")),
        ("migration_over_plain", ratio("migration_s", "plain_migration_s")),
        ("migration_max_over_median", ratio("migration_max_s", "migration_s")),
        (
            "console_round_trip_migrating_over_quiet",
            ratio("console_round_trip_migrating_ms", "console_round_trip_quiet_ms"),
        ),
        ("pod_create_over_without_policies", ratio("pod_create_ms", "pod_create_without_policies_ms")),
        (
            "pod_status_patch_over_without_policies",
            ratio("pod_status_patch_ms", "pod_status_patch_without_policies_ms"),
        ),
        ("migration_begin_over_pod", ratio("migration_begin_s", "pod_beside_migration_running_s")),
        ("migration_blackout_over_plain", ratio("migration_blackout_ms", "plain_blackout_ms")),
        ("portforward_direct_over_forwarded", ratio("portforward_direct_mib_s", "portforward_mib_s")),
        ("channel_1ms_time_over_before", ratio("channel_1ms_s_per_gib", "before_channel_1ms_s_per_gib")),
        ("channel_cpu_over_before", ratio("channel_cpu_s_per_gib", "before_channel_cpu_s_per_gib")),
        ("webhook_attacked_over_quiet", ratio("webhook_attacked_p99_ms", "webhook_p99_ms")),
    ];
    figures.extend(compared.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
}

/// Writes the figures into a file of the build folder.
pub(crate) fn write(figures: &Figures, name: &str) -> Result<()> {
    let file = repository().join("build").join(name);
    let rounded: BTreeMap<&String, f64> = figures.iter().map(|(k, v)| (k, (v * 1000.0).round() / 1000.0)).collect();
    std::fs::create_dir_all(repository().join("build"))?;
    std::fs::write(&file, serde_json::to_string_pretty(&rounded)?)
        .with_context(|| format!("cannot write {}", file.display()))
}

/// Prints the figures with their targets.
pub(crate) fn print(figures: &Figures) {
    println!("\n{:<50} {:>10}  target", "figure", "value");
    for (name, value) in figures {
        let target = target(name)
            .map_or(String::new(), |most| format!("<= {most}  {}", if *value > most { "MISSED" } else { "met" }));
        println!("{name:<50} {value:>10.3}  {target}");
    }
}

/// Returns the target of a figure.
fn target(name: &str) -> Option<f64> {
    let is_number = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    let words = name.split('_').map(|word| if is_number(word) { "#" } else { word });
    let general = words.collect::<Vec<_>>().join("_");
    TARGETS.iter().chain(&SCALE_TARGETS).find(|(of, _)| *of == name || *of == general).map(|(_, most)| *most)
}

/// Adds the medians of measured values.
pub(crate) fn add_medians<'a>(
    figures: &mut Figures,
    measured: impl IntoIterator<Item = (&'a str, Vec<f64>)>,
) -> Result<()> {
    for (name, values) in measured {
        figures.insert(name.to_owned(), median(&values).with_context(|| format!("no value of {name}"))?);
    }
    Ok(())
}

/// Returns the median, or the lower of the two middle values.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    percentile(values, 50)
}

/// Returns a percentile (nearest rank).
pub(crate) fn percentile(values: &[f64], percent: usize) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let rank = (values.len() * percent).div_ceil(100);
    values.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_apply_to_every_size() {
        assert_eq!(target("vmi_running_over_pod"), Some(1.5));
        assert_eq!(target("vms_4000_p50_over_pods"), Some(1.5));
        assert_eq!(target("vms_p50_over_pods"), None);
        assert_eq!(target("vms_4000_p95_over_pods"), None);
    }

    #[test]
    fn comparisons_need_both_sides() {
        let mut figures = Figures::from([("migration_max_s".to_owned(), 6.0)]);
        compare(&mut figures);
        assert_eq!(figures.len(), 1);
        figures.insert("migration_s".into(), 2.0);
        compare(&mut figures);
        assert_eq!(figures["migration_max_over_median"], 3.0);
    }

    #[test]
    fn percentile_is_the_nearest_rank() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(percentile(&values, 99), Some(198.0));
        assert_eq!(percentile(&values, 50), Some(100.0));
        assert_eq!(percentile(&[3.0, 1.0, 2.0], 50), Some(2.0));
        assert_eq!(percentile(&[4.0, 1.0, 2.0, 3.0], 50), Some(2.0));
        assert_eq!(percentile(&[7.0], 99), Some(7.0));
        assert_eq!(percentile(&[], 99), None);
    }
}
