//! Which pods of this node may hold the launcher of a machine.

use std::collections::BTreeMap;

/// Longest pod UID taken from a status. Kubernetes' own are 36 characters; static pods have 32.
const MAX_UID: usize = 64;

/// Pods of this node that the status of a machine names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Candidates {
    /// The machine has no pod here.
    None,
    /// The UID of its pod.
    One(String),
    /// More than one, in order; the launcher is known only once a single one has a socket.
    Several(Vec<String>),
}

/// The pods on `node` among `status.activePods` (pod UID to node name; an empty name stands for any node).
///
/// A UID becomes a component of a path on the node, so whatever does not look like one is left out.
#[must_use]
pub fn candidates(active_pods: &BTreeMap<String, String>, node: &str) -> Candidates {
    let mut here: Vec<String> = active_pods
        .iter()
        .filter(|(uid, name)| (name.is_empty() || *name == node) && is_uid(uid))
        .map(|(uid, _)| uid.clone())
        .collect();
    match here.len() {
        0 => Candidates::None,
        1 => Candidates::One(here.swap_remove(0)),
        _ => Candidates::Several(here),
    }
}

fn is_uid(text: &str) -> bool {
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
    fn a_uid_that_would_leave_the_directory_is_left_out() {
        for hostile in ["..", "a/b", "", ".", "a\0b", "../../etc", &"a".repeat(65)] {
            assert_eq!(candidates(&pods(&[(hostile, "n1")]), "n1"), Candidates::None, "{hostile:?}");
        }
    }
}
