//! The metric with the labels of VMs, and its filter.

use std::collections::{BTreeMap, BTreeSet};

use api::VirtualMachine;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt;
use prometheus::{
    Opts,
    proto::{Gauge, LabelPair, Metric, MetricFamily, MetricType},
};

/// Keys of the ConfigMap with the filter.
const ALLOWED: &str = "allowlist";
const IGNORED: &str = "ignorelist";
/// Stands for every label in a list.
const EVERY: &str = "*";
/// Most labels of a VM in the metric: a user could write thousands into one VM, and each is a name of a label in Prometheus.
const MOST: usize = 64;

/// Labels of VMs that the metric shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Filter {
    /// `None`: all.
    allowed: Option<BTreeSet<String>>,
    ignored: BTreeSet<String>,
}

impl Filter {
    /// Reads the filter. Without a ConfigMap, or without a list of allowed labels in it, all labels are shown.
    pub(super) fn of(map: Option<&ConfigMap>) -> Self {
        let list = |key: &str| {
            let text = map?.data.as_ref()?.get(key)?;
            let keys = text.split(',').map(str::trim).filter(|key| !key.is_empty());
            Some(keys.map(str::to_owned).collect::<BTreeSet<String>>())
        };
        let allowed = list(ALLOWED).filter(|keys| !keys.contains(EVERY));
        Self { allowed, ignored: list(IGNORED).unwrap_or_default() }
    }

    fn admits(&self, key: &str) -> bool {
        let is_ignored = self.ignored.contains(key) || self.ignored.contains(EVERY);
        !is_ignored && self.allowed.as_ref().is_none_or(|allowed| allowed.contains(key))
    }
}

/// The metric.
pub(super) struct VmLabels {
    filter: Filter,
    metrics: Vec<Metric>,
}

impl VmLabels {
    /// Creates the empty metric.
    pub(super) fn new(filter: Filter) -> Self {
        Self { filter, metrics: Vec::new() }
    }

    /// Adds a VM. One without labels to show has no sample.
    pub(super) fn vm(&mut self, vm: &VirtualMachine) {
        let shown = shown(vm, &self.filter);
        if shown.is_empty() {
            return;
        }
        let (name, namespace) = (vm.name_any(), vm.namespace().unwrap_or_default());
        let mut labels = vec![pair("name", &name), pair("namespace", &namespace)];
        labels.extend(shown.iter().map(|(key, value)| pair(key, value)));
        let mut metric = Metric::from_label(labels);
        let mut gauge = Gauge::default();
        gauge.set_value(1.0);
        metric.set_gauge(gauge);
        self.metrics.push(metric);
    }

    /// Returns the metric.
    pub(super) fn families(self) -> Vec<MetricFamily> {
        let described = Opts::new("kubevirt_vm_labels", "Labels of VMs");
        let mut family = MetricFamily::default();
        family.set_name(described.name);
        family.set_help(described.help);
        family.set_field_type(MetricType::GAUGE);
        family.set_metric(self.metrics);
        vec![family]
    }
}

/// Returns the labels of a VM under their names in metrics. Those of the template take precedence.
fn shown<'v>(vm: &'v VirtualMachine, filter: &Filter) -> BTreeMap<String, &'v str> {
    let template = vm.spec.template.metadata.labels.iter().flatten();
    let all: BTreeMap<&str, &str> =
        vm.labels().iter().chain(template).map(|(key, value)| (key.as_str(), value.as_str())).collect();
    let admitted = all.into_iter().filter(|(key, _)| filter.admits(key)).take(MOST);
    admitted.map(|(key, value)| (metric_label(key), value)).collect()
}

/// Returns the name under which metrics have a label.
fn metric_label(key: &str) -> String {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let word: String = key.chars().map(|c| if is_word(c) { c } else { '_' }).collect();
    let digit = if word.starts_with(|c: char| c.is_ascii_digit()) { "_" } else { "" };
    format!("label_{digit}{word}")
}

fn pair(name: &str, value: &str) -> LabelPair {
    let mut pair = LabelPair::default();
    pair.set_name(name.to_owned());
    pair.set_value(value.to_owned());
    pair
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn vm(labels: Value, template: Value) -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
            "metadata": {"name": "v", "namespace": "ns", "labels": labels},
            "spec": {"template": {"metadata": {"labels": template}, "spec": {"domain": {"devices": {}}}}},
        }))
        .unwrap()
    }

    #[test]
    fn lists_select_labels() {
        let vm = vm(json!({"app": "shop", "team": "vm"}), json!({"team": "template", "7.example.com/tier-1": "x"}));
        let all = vec!["label__7_example_com_tier_1=x", "label_app=shop", "label_team=template"];
        for (data, wanted) in [
            (None, all.clone()),
            (Some(json!({})), all.clone()),
            (Some(json!({"allowlist": "app, team"})), vec!["label_app=shop", "label_team=template"]),
            (Some(json!({"allowlist": ""})), vec![]),
            (Some(json!({"allowlist": "*", "ignorelist": "team"})), all[..2].to_vec()),
            (Some(json!({"allowlist": "app", "ignorelist": "app"})), vec![]),
            (Some(json!({"ignorelist": "*"})), vec![]),
        ] {
            let map = data.as_ref().map(|data| serde_json::from_value::<ConfigMap>(json!({"data": data})).unwrap());
            let found = shown(&vm, &Filter::of(map.as_ref()));
            let found: Vec<String> = found.iter().map(|(key, value)| format!("{key}={value}")).collect();
            assert_eq!(found, wanted, "{data:?}");
        }
    }

    #[test]
    fn labels_are_bounded_and_each_name_occurs_once() {
        let many: serde_json::Map<String, Value> = (0..1000).map(|n| (format!("l{n}"), json!("x"))).collect();
        assert_eq!(shown(&vm(Value::Object(many), json!({})), &Filter::default()).len(), MOST);
        let same = vm(json!({"a.b": "1", "a-b": "2", "a_b": "3"}), json!({}));
        assert_eq!(shown(&same, &Filter::default()), [("label_a_b".to_owned(), "3")].into());
    }

    #[test]
    fn vms_without_labels_have_no_sample() {
        let mut labels = VmLabels::new(Filter::default());
        labels.vm(&vm(json!({}), json!({})));
        labels.vm(&vm(json!({"app": "shop"}), json!({})));
        let families = labels.families();
        let [family] = families.as_slice() else { panic!("{families:?}") };
        let metrics = family.get_metric();
        assert_eq!((family.name(), metrics.len()), ("kubevirt_vm_labels", 1));
        let labels: Vec<_> = metrics[0].get_label().iter().map(|label| (label.name(), label.value())).collect();
        assert_eq!(labels, [("name", "v"), ("namespace", "ns"), ("label_app", "shop")]);
    }
}
