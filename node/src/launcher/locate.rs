//! The pods of this node that may contain the launcher of a VMI.

use std::collections::BTreeMap;

/// Longest pod UID. UIDs of Kubernetes have 36 characters, those of static pods 32.
const MAX_UID: usize = 64;

/// Pods of this node in the status of a VMI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Candidates {
    /// The VMI has no pod here.
    None,
    /// The UID of its pod.
    One(String),
    /// Several pods, in order. The launcher is known only once a single one remains.
    Several(Vec<String>),
}

/// Returns the pods on `node` among `status.activePods` (pod UID to node name; an empty name matches any node).
///
/// A UID becomes a path component on the node, so that invalid ones are left out.
pub(crate) fn candidates(active_pods: &BTreeMap<String, String>, node: &str) -> Candidates {
    let mut here: Vec<String> = active_pods
        .iter()
        .filter(|(uid, name)| (name.is_empty() || *name == node) && is_pod_uid(uid))
        .map(|(uid, _)| uid.clone())
        .collect();
    match here.len() {
        0 => Candidates::None,
        1 => Candidates::One(here.swap_remove(0)),
        _ => Candidates::Several(here),
    }
}

/// Accepts the UID of a pod, which becomes a path component.
pub(crate) fn is_pod_uid(text: &str) -> bool {
    (1..=MAX_UID).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pods(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
        entries.iter().map(|(uid, node)| ((*uid).to_owned(), (*node).to_owned())).collect()
    }

    #[test]
    fn only_pods_of_this_node_are_candidates() {
        assert_eq!(candidates(&pods(&[]), "n1"), Candidates::None);
        assert_eq!(candidates(&pods(&[("a1", "n2")]), "n1"), Candidates::None);
        assert_eq!(candidates(&pods(&[("a1", "n1"), ("b2", "n2")]), "n1"), Candidates::One("a1".into()));
        assert_eq!(candidates(&pods(&[("a1", "")]), "n1"), Candidates::One("a1".into()));
        assert_eq!(
            candidates(&pods(&[("a1", "n1"), ("b2", "n1")]), "n1"),
            Candidates::Several(vec!["a1".into(), "b2".into()])
        );
    }

    #[test]
    fn a_uid_that_leads_out_of_the_directory_is_left_out() {
        for hostile in ["..", "a/b", "", ".", "a\0b", "../../etc", &"a".repeat(65)] {
            assert_eq!(candidates(&pods(&[(hostile, "n1")]), "n1"), Candidates::None, "{hostile:?}");
        }
    }
}
