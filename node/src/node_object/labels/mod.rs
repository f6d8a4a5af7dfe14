//! The labels with which the scheduler finds a node for a VMI: pure functions of libvirt's description of the node.
//!
//! Running pods keep their node selectors, and kubelet checks them again after its restart. The labels therefore describe
//! permanent properties of the node; devices that cannot be used at the moment are unhealthy instead.

use std::collections::{BTreeMap, BTreeSet};

use api::constants::label;
use roxmltree::{Document, Node, ParsingOptions};

/// Most elements of a document of libvirt; those of QEMU 10 have some thousands.
const MAX_NODES: u32 = 100_000;
/// Most labels of a node: an object has space for some thousands.
const MAX_LABELS: usize = 2000;
/// Value of labels without a value of their own.
const TRUE: &str = "true";

/// CPU models that are not offered by default.
const OBSOLETE: [&str; 16] = [
    "486",
    "pentium",
    "pentium2",
    "pentium3",
    "pentiumpro",
    "coreduo",
    "n270",
    "core2duo",
    "Conroe",
    "athlon",
    "phenom",
    "qemu64",
    "qemu32",
    "kvm64",
    "kvm32",
    "Opteron_G1",
];
/// The newest of them; its later variants are offered.
const OBSOLETE_LAST: &str = "Opteron_G2";

/// Prefixes of labels that virt-handler owns.
const PREFIXES: [&str; 10] = [
    label::CPU_FEATURE_PREFIX,
    label::CPU_MODEL_PREFIX,
    label::CPU_MODEL_MIGRATION_PREFIX,
    label::CPU_TIMER_PREFIX,
    label::CPU_VENDOR_PREFIX,
    label::HYPERV_PREFIX,
    label::HOST_MODEL_CPU_PREFIX,
    label::HOST_MODEL_REQUIRED_FEATURES_PREFIX,
    label::MACHINE_TYPE_PREFIX,
    label::VM_ARCH_PREFIX,
];
/// Single labels that virt-handler owns.
const SINGLE: [&str; 7] = [
    label::OBSOLETE_HOST_MODEL,
    label::REALTIME,
    label::SEV,
    label::SEV_ES,
    label::SEV_SNP,
    label::TDX,
    label::S390_PV,
];

/// Reason why libvirt's description of the node cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{document} cannot be parsed")]
pub(crate) struct Error {
    document: &'static str,
    #[source]
    source: roxmltree::Error,
}

/// libvirt's description of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Capabilities {
    /// Machine types of all guest architectures.
    machine_types: BTreeSet<String>,
    /// Those of them that a later release of QEMU will not have.
    deprecated_machine_types: BTreeSet<String>,
    /// Frequency of the time stamp counter; true if it can be scaled for a guest.
    tsc: Option<(u64, bool)>,
    /// CPU models; true if usable on this node.
    models: BTreeMap<String, bool>,
    /// The model that is closest to the node's CPU.
    host_model: Option<String>,
    /// Features of the node's CPU beyond that model.
    host_features: BTreeSet<String>,
    /// Vendor of the CPU.
    vendor: Option<String>,
    /// All features of the CPU.
    features: BTreeSet<String>,
    /// Hyper-V features of QEMU.
    hyperv: BTreeSet<String>,
    sev: bool,
    sev_es: bool,
    sev_snp: bool,
    tdx: bool,
    s390_pv: bool,
}

impl Capabilities {
    /// Parses libvirt's documents: capabilities, domain capabilities, and the optional list of CPU features.
    pub(crate) fn parse(host: &str, domain: &str, features: Option<&str>) -> Result<Self, Error> {
        let host = document("capabilities.xml", host)?;
        let domain = document("virsh_domcapabilities.xml", domain)?;
        let features = features.map(|text| document("supported_features.xml", text)).transpose()?;
        let mut capabilities = Self::default();
        capabilities.read_host(&host);
        capabilities.read_domain(&domain);
        match &features {
            Some(document) => capabilities.features = required(document.root()),
            // Without the expanded list, only the features beyond the model are known.
            None => capabilities.features.clone_from(&capabilities.host_features),
        }
        Ok(capabilities)
    }

    /// Returns the machine types that a later release of QEMU will not have.
    pub(crate) fn deprecated_machine_types(&self) -> &BTreeSet<String> {
        &self.deprecated_machine_types
    }

    fn read_host(&mut self, document: &Document<'_>) {
        let machines =
            || document.descendants().filter(|node| node.has_tag_name("machine") && within(node, &["arch", "guest"]));
        self.machine_types = machines().filter_map(text).collect();
        let is_deprecated = |node: &Node<'_, '_>| node.attribute("deprecated") == Some("yes");
        self.deprecated_machine_types = machines().filter(is_deprecated).filter_map(text).collect();
        self.tsc = document
            .descendants()
            .find(|node| {
                node.has_tag_name("counter") && node.attribute("name") == Some("tsc") && within(node, &["cpu", "host"])
            })
            .and_then(|node| {
                let frequency = node.attribute("frequency")?.parse().ok()?;
                Some((frequency, node.attribute("scaling") == Some("yes")))
            });
    }

    fn read_domain(&mut self, document: &Document<'_>) {
        for mode in document.descendants().filter(|node| node.has_tag_name("mode") && within(node, &["cpu"])) {
            match mode.attribute("name") {
                Some("custom") => {
                    for model in children(mode, "model") {
                        if let Some(name) = text(model) {
                            let usable = model.attribute("usable") != Some("no");
                            *self.models.entry(name).or_default() |= usable;
                        }
                    }
                }
                Some("host-model") if mode.attribute("supported") != Some("no") => {
                    self.host_model = children(mode, "model").find_map(text);
                    self.vendor = children(mode, "vendor").find_map(text);
                    self.host_features = required(mode);
                }
                _ => {}
            }
        }
        let feature = |name: &str| {
            document
                .descendants()
                .find(|node| node.has_tag_name(name) && within(node, &["features"]))
                .filter(|node| node.attribute("supported") == Some("yes"))
        };
        let sev = feature("sev");
        self.sev = sev.is_some();
        self.sev_es = sev.is_some_and(|sev| {
            children(sev, "maxESGuests").filter_map(text).any(|count| count.parse().is_ok_and(|count: u64| count > 0))
        });
        // Only if the host has proven to protect register state (CVE-2025-48514).
        self.sev_snp = self.sev_es
            && feature("launchSecurity").is_some_and(|security| values(security, "sectype").contains("sev-snp"));
        self.tdx = feature("tdx").is_some();
        self.s390_pv = feature("s390-pv").is_some();
        self.hyperv = feature("hyperv").map(|hyperv| values(hyperv, "features")).unwrap_or_default();
    }
}

/// Other inputs of the labels.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeFacts {
    /// Architecture of the node in Kubernetes' terms.
    pub architecture: String,
    /// CPU models that are not offered; empty: the default list.
    pub obsolete_models: BTreeMap<String, bool>,
    /// Real-time tasks may use all of the CPU's time.
    pub realtime: bool,
    /// kubelet pins CPUs, and the feature gate is enabled.
    pub cpu_manager: bool,
    /// Labels name the architecture.
    pub cross_architecture: bool,
}

/// Returns the desired labels of the node.
pub(crate) fn labels(capabilities: &Capabilities, facts: &NodeFacts) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    let mut add = |prefix: &str, name: &str, value: &str| {
        let key = format!("{prefix}{name}");
        if labels.len() < MAX_LABELS && is_label(&key) && is_label_value(value) {
            labels.insert(key, value.to_owned());
        }
    };
    for machine_type in &capabilities.machine_types {
        add(label::MACHINE_TYPE_PREFIX, machine_type, TRUE);
    }
    // libvirt reports no comparable models and features for arm64.
    if matches!(facts.architecture.as_str(), "amd64" | "s390x") {
        for feature in &capabilities.features {
            add(label::CPU_FEATURE_PREFIX, feature, TRUE);
        }
        for (model, usable) in &capabilities.models {
            if is_obsolete(model, &facts.obsolete_models) {
                continue;
            }
            add(label::CPU_MODEL_MIGRATION_PREFIX, model, TRUE);
            if *usable {
                add(label::CPU_MODEL_PREFIX, model, TRUE);
            }
        }
        if let Some(model) = &capabilities.host_model {
            add(label::HOST_MODEL_CPU_PREFIX, model, TRUE);
            for feature in &capabilities.host_features {
                add(label::HOST_MODEL_REQUIRED_FEATURES_PREFIX, feature, TRUE);
            }
            if facts.obsolete_models.get(model) == Some(&true) {
                add(label::OBSOLETE_HOST_MODEL, "", TRUE);
            }
        }
        let vendor = match &capabilities.vendor {
            None if facts.architecture == "s390x" => Some("IBM"),
            vendor => vendor.as_deref(),
        };
        if let Some(vendor) = vendor {
            add(label::CPU_VENDOR_PREFIX, vendor, TRUE);
        }
    }
    if facts.architecture == "amd64" {
        for name in capabilities.hyperv.iter().flat_map(|name| hyperv_labels(name)) {
            add(label::HYPERV_PREFIX, name, TRUE);
        }
    }
    if let Some((frequency, scalable)) = capabilities.tsc {
        add(label::CPU_TIMER_PREFIX, "tsc-frequency", &frequency.to_string());
        add(label::CPU_TIMER_PREFIX, "tsc-scalable", if scalable { TRUE } else { "false" });
    }
    let single = [
        (label::REALTIME, facts.realtime),
        (label::SEV, capabilities.sev),
        (label::SEV_ES, capabilities.sev_es),
        (label::SEV_SNP, capabilities.sev_snp),
        (label::TDX, capabilities.tdx),
        (label::S390_PV, capabilities.s390_pv),
    ];
    for (key, _) in single.iter().filter(|(_, holds)| *holds) {
        add(key, "", TRUE);
    }
    if facts.cross_architecture && !facts.architecture.is_empty() {
        add(label::VM_ARCH_PREFIX, &facts.architecture, TRUE);
        // QEMU for arm64 is in an image of its own, which any node of amd64 can run.
        if facts.architecture == "amd64" {
            add(label::VM_ARCH_PREFIX, "arm64", TRUE);
        }
    }
    labels
}

/// Returns the labels that always exist, with either value.
pub(crate) fn switches(facts: &NodeFacts) -> BTreeMap<String, String> {
    let value = if facts.cpu_manager { TRUE } else { "false" };
    [label::CPU_MANAGER, label::CPU_MANAGER_LEGACY].map(|key| (key.to_owned(), value.to_owned())).into()
}

/// Returns the changes from `current` to the desired labels: `None` removes a label. Labels of other owners are ignored.
#[must_use]
pub(crate) fn changes(
    current: &BTreeMap<String, String>,
    desired: &BTreeMap<String, String>,
) -> BTreeMap<String, Option<String>> {
    let stale = current.keys().filter(|key| is_ours(key) && !desired.contains_key(*key)).map(|key| (key.clone(), None));
    let new = desired
        .iter()
        .filter(|(key, value)| current.get(*key) != Some(value))
        .map(|(key, value)| (key.clone(), Some(value.clone())));
    stale.chain(new).collect()
}

/// Returns true if virt-handler owns the label.
fn is_ours(key: &str) -> bool {
    PREFIXES.iter().any(|prefix| key.starts_with(prefix)) || SINGLE.contains(&key)
}

fn is_obsolete(model: &str, configured: &BTreeMap<String, bool>) -> bool {
    if !configured.is_empty() {
        return configured.get(model) == Some(&true);
    }
    let base = model.strip_suffix("-v1").unwrap_or(model);
    OBSOLETE.contains(&base) || base == OBSOLETE_LAST
}

/// Returns the names of a Hyper-V feature of libvirt in the selectors of VMIs.
fn hyperv_labels(libvirt: &str) -> &'static [&'static str] {
    match libvirt {
        "frequencies" => &["frequencies"],
        "ipi" => &["ipi"],
        "reenlightenment" => &["reenlightenment"],
        // Every QEMU with Hyper-V features provides this one; kernels of the last ten years provide the timer.
        "relaxed" => &["base", "time"],
        "reset" => &["reset"],
        "runtime" => &["runtime"],
        "stimer" => &["synictimer"],
        // QEMU offers it only with kernels that provide the second version.
        "synic" => &["synic", "synic2"],
        "tlbflush" => &["tlbflush"],
        "vpindex" => &["vpindex"],
        _ => &[],
    }
}

/// Returns true if the text is a valid label key: the name has at most 63 characters of a limited set.
fn is_label(key: &str) -> bool {
    let name = key.split_once('/').map_or(key, |(_, name)| name);
    !name.is_empty() && is_label_value(name)
}

/// Returns true if the text is a valid label value.
fn is_label_value(value: &str) -> bool {
    let bytes = value.as_bytes();
    let inner = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let ends = [bytes.first(), bytes.last()];
    bytes.len() <= 63 && bytes.iter().all(inner) && ends.iter().flatten().all(|byte| byte.is_ascii_alphanumeric())
}

fn document<'text>(name: &'static str, text: &'text str) -> Result<Document<'text>, Error> {
    let options = ParsingOptions { allow_dtd: false, nodes_limit: MAX_NODES, ..ParsingOptions::default() };
    Document::parse_with_options(text, options).map_err(|source| Error { document: name, source })
}

/// Returns true if the parent elements of a node have these names, innermost first.
fn within(node: &Node<'_, '_>, names: &[&str]) -> bool {
    names.iter().zip(node.ancestors().skip(1)).filter(|(name, around)| around.has_tag_name(**name)).count()
        == names.len()
}

fn children<'a, 'text>(node: Node<'a, 'text>, name: &'static str) -> impl Iterator<Item = Node<'a, 'text>> {
    node.children().filter(move |child| child.has_tag_name(name))
}

fn text(node: Node<'_, '_>) -> Option<String> {
    node.text().map(str::trim).filter(|text| !text.is_empty()).map(str::to_owned)
}

/// Returns the required features below a node.
fn required(node: Node<'_, '_>) -> BTreeSet<String> {
    node.descendants()
        .filter(|node| node.has_tag_name("feature") && matches!(node.attribute("policy"), Some("require" | "")))
        .filter_map(|node| node.attribute("name").map(str::to_owned))
        .collect()
}

/// Returns the values of an enumeration below a node.
fn values(node: Node<'_, '_>, name: &str) -> BTreeSet<String> {
    children(node, "enum")
        .filter(|list| list.attribute("name") == Some(name))
        .flat_map(|list| children(list, "value"))
        .filter_map(text)
        .collect()
}

#[cfg(test)]
mod tests;
