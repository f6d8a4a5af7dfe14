//! Version and feature gates of a cluster's Kubernetes.

use std::{collections::BTreeMap, fmt, str::FromStr};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// A version of Kubernetes that the cluster can run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Kubernetes {
    /// 1.35.
    #[value(name = "1.35")]
    #[serde(rename = "1.35")]
    V1_35,
    /// 1.36.
    #[default]
    #[value(name = "1.36")]
    #[serde(rename = "1.36")]
    V1_36,
    /// 1.37.
    #[value(name = "1.37")]
    #[serde(rename = "1.37")]
    V1_37,
}

impl Kubernetes {
    /// Returns the release that the cluster runs.
    #[must_use]
    pub const fn patch(self) -> &'static str {
        match self {
            Self::V1_35 => "1.35.4",
            Self::V1_36 => "1.36.3",
            Self::V1_37 => "1.37.2",
        }
    }

    /// Returns the minor version.
    #[must_use]
    pub const fn minor(self) -> &'static str {
        match self {
            Self::V1_35 => "35",
            Self::V1_36 => "36",
            Self::V1_37 => "37",
        }
    }
}

impl fmt::Display for Kubernetes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "1.{}", self.minor())
    }
}

/// A feature gate with its setting, written `NAME=true` or `NAME=false`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeatureGate(pub String, pub bool);

impl FromStr for FeatureGate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, enabled) = text.split_once('=').ok_or("write NAME=true or NAME=false")?;
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(format!("{name:?} is not the name of a feature gate"));
        }
        Ok(Self(name.to_owned(), enabled.parse().map_err(|_| format!("{enabled:?} is neither true nor false"))?))
    }
}

/// Version and feature gates. By default the cluster is a stock one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Variant {
    /// The version.
    pub kubernetes: Kubernetes,
    /// Feature gates of the control plane and the kubelets that differ from the defaults.
    pub feature_gates: BTreeMap<String, bool>,
    /// Nodes whose kubelets give pods CPUs of their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub static_cpus: Vec<String>,
    /// Nodes, pods and Services have IPv6 addresses beside those of IPv4.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dual_stack: bool,
}

impl Variant {
    /// Returns the feature gates as the programs read them, or `None` if they have their defaults.
    #[must_use]
    pub(crate) fn gates_flag(&self) -> Option<String> {
        let gates: Vec<_> = self.feature_gates.iter().map(|(name, enabled)| format!("{name}={enabled}")).collect();
        (!gates.is_empty()).then(|| gates.join(","))
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kubernetes {}", self.kubernetes.patch())?;
        self.gates_flag().map_or(Ok(()), |gates| write!(f, " with {gates}"))?;
        if self.dual_stack {
            write!(f, ", IPv4 and IPv6")?;
        }
        if self.static_cpus.is_empty() {
            return Ok(());
        }
        write!(f, ", static CPU manager on {}", self.static_cpus.join(" and "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn feature_gates_are_read_and_written_as_kubernetes_does() {
        let gate = |text: &str| text.parse::<FeatureGate>();
        assert_eq!(gate("ImageVolume=false"), Ok(FeatureGate("ImageVolume".into(), false)));
        for wrong in ["ImageVolume", "ImageVolume=off", "=true", "a b=true"] {
            assert!(gate(wrong).is_err(), "{wrong}");
        }
        let mut variant = Variant::default();
        assert_eq!((variant.gates_flag(), variant.to_string()), (None, "Kubernetes 1.36.3".into()));
        variant.feature_gates.extend([("B".into(), true), ("A".into(), false)]);
        assert_eq!(variant.gates_flag().as_deref(), Some("A=false,B=true"));
        assert_eq!(variant.to_string(), "Kubernetes 1.36.3 with A=false,B=true");
        variant.static_cpus = vec!["node-2".into()];
        assert_eq!(variant.to_string(), "Kubernetes 1.36.3 with A=false,B=true, static CPU manager on node-2");
        variant = Variant { dual_stack: true, ..Variant::default() };
        assert_eq!(variant.to_string(), "Kubernetes 1.36.3, IPv4 and IPv6");
    }
}
