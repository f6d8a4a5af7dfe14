//! Conditions of readiness.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use crate::lock;

/// Named conditions that have to hold before the process takes traffic.
#[derive(Clone, Default)]
pub struct Readiness {
    /// The reason why a condition does not hold, or `None` when it holds.
    conditions: Arc<Mutex<BTreeMap<&'static str, Option<String>>>>,
}

impl Readiness {
    /// Creates a readiness without conditions: ready.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the condition `name`. A condition that is first set to false keeps the process unready until it is set to true.
    pub fn set(&self, name: &'static str, holds: bool) {
        lock(&self.conditions).insert(name, (!holds).then(String::new));
    }

    /// Sets the condition `name` to false, with a reason that `/readyz` reports.
    pub fn hold_back(&self, name: &'static str, reason: impl Into<String>) {
        lock(&self.conditions).insert(name, Some(reason.into()));
    }

    /// Returns the conditions that do not hold, with the reason if there is one.
    #[must_use]
    pub fn missing(&self) -> Vec<String> {
        let conditions = lock(&self.conditions);
        let missing = conditions.iter().filter_map(|(name, missing)| missing.as_ref().map(|reason| (name, reason)));
        missing
            .map(|(name, reason)| if reason.is_empty() { (*name).to_owned() } else { format!("{name} ({reason})") })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_names_missing_conditions() {
        let readiness = Readiness::new();
        assert!(readiness.missing().is_empty());
        readiness.set("certificate", false);
        readiness.set("caches", true);
        assert_eq!(readiness.missing(), ["certificate"]);
        readiness.hold_back("caches", "the list is awaited");
        assert_eq!(readiness.missing(), ["caches (the list is awaited)", "certificate"]);
        readiness.set("certificate", true);
        readiness.set("caches", true);
        assert!(readiness.missing().is_empty());
    }
}
