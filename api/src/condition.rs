//! The condition shape shared by all kinds.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One observed condition.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Time of the last probe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_probe_time: Option<Time>,
    /// Time of the last change of the status.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Time>,
    /// Human-readable message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// CamelCase reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// Name of the condition.
    #[serde(rename = "type")]
    pub type_: String,
}

impl Condition {
    /// Returns a condition that changed at `now`.
    pub fn new(type_: &str, status: bool, reason: &str, message: &str, now: &Time) -> Self {
        Self {
            last_probe_time: None,
            last_transition_time: Some(now.clone()),
            message: some(message),
            reason: some(reason),
            status: if status { "True" } else { "False" }.to_owned(),
            type_: type_.to_owned(),
        }
    }

    /// Returns true if the status is `True`.
    pub fn is_true(&self) -> bool {
        self.status == "True"
    }

    /// Returns true if the status is `False`.
    pub fn is_false(&self) -> bool {
        self.status == "False"
    }

    /// Returns true if two conditions are equal apart from their times.
    pub fn says_same(&self, other: &Self) -> bool {
        self.type_ == other.type_
            && self.status == other.status
            && self.reason == other.reason
            && self.message == other.message
    }
}

/// Sets a condition in a list: replaces the one of its type, or appends it. Keeps the transition time if the status is the
/// same. Returns true if the list changed.
pub fn set(conditions: &mut Vec<Condition>, mut condition: Condition) -> bool {
    match conditions.iter_mut().find(|old| old.type_ == condition.type_) {
        Some(old) if old.says_same(&condition) => false,
        Some(old) => {
            if old.status == condition.status && old.last_transition_time.is_some() {
                condition.last_transition_time.clone_from(&old.last_transition_time);
            }
            *old = condition;
            true
        }
        None => {
            conditions.push(condition);
            true
        }
    }
}

/// Removes a condition type from a list. Returns true if it was present.
pub fn remove(conditions: &mut Vec<Condition>, type_: &str) -> bool {
    let before = conditions.len();
    conditions.retain(|condition| condition.type_ != type_);
    conditions.len() != before
}

/// Sets a condition in a list, or removes its type if it does not hold (`None`). Returns true if the list changed.
pub fn set_or_remove(conditions: &mut Vec<Condition>, type_: &str, condition: Option<Condition>) -> bool {
    match condition {
        Some(condition) => set(conditions, condition),
        None => remove(conditions, type_),
    }
}

fn some(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Time {
        Time(jiff::Timestamp::from_second(second).unwrap())
    }

    #[test]
    fn same_condition_leaves_the_list_alone() {
        let mut list = vec![Condition::new("Ready", true, "", "", &at(1))];
        assert!(!set(&mut list, Condition::new("Ready", true, "", "", &at(2))));
        assert_eq!(list[0].last_transition_time, Some(at(1)));
    }

    #[test]
    fn transition_time_moves_only_with_the_status() {
        let mut list = vec![Condition::new("Ready", false, "A", "", &at(1))];
        assert!(set(&mut list, Condition::new("Ready", false, "B", "", &at(2))));
        assert_eq!(list[0].last_transition_time, Some(at(1)));
        assert!(set(&mut list, Condition::new("Ready", true, "B", "", &at(3))));
        assert_eq!(list[0].last_transition_time, Some(at(3)));
        assert!(remove(&mut list, "Ready"));
        assert!(!remove(&mut list, "Ready"));
    }
}
