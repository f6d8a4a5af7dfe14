//! Names of launcher pods. They follow from the VMI and the use of the pod, so that a second creation is a conflict and no second pod.

use api::{VirtualMachineInstance, names};
use sha2::{Digest, Sha256};

/// Names that are tried. Each but the first is for the case that pods of others have those before it.
const ATTEMPTS: u8 = 3;
/// Most characters before the suffix, as many as the API server leaves of `generateName`: the whole has 63 at most.
const BEGINNING: usize = 58;
/// Characters of the suffix. virt-handler finds the pods of a VMI by them.
const SUFFIX: usize = 5;
/// Characters of suffixes, those of the API server: without vowels, so that no words arise.
const CHARACTERS: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";

/// The use of a launcher pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use<'a> {
    /// It runs the guest.
    Start,
    /// It lets the scheduler bind claims.
    Binding,
    /// It is the target of the migration with this UID.
    Migration(&'a str),
}

/// Returns the names of a pod, in the order in which they are tried.
pub(crate) fn pod_names(instance: &VirtualMachineInstance, of: Use<'_>) -> Vec<String> {
    let name = instance.metadata.name.as_deref().unwrap_or_default();
    let uid = instance.metadata.uid.as_deref().unwrap_or_default();
    let mut beginning = format!("virt-launcher-{}-", names::shortened(name, names::LABEL_LIMIT));
    beginning.truncate(BEGINNING);
    let of = match of {
        Use::Start => "start",
        Use::Binding => "binding",
        Use::Migration(uid) => uid,
    };
    (0..ATTEMPTS).map(|attempt| format!("{beginning}{}", suffix(&format!("{uid}/{of}/{attempt}")))).collect()
}

/// Returns characters that follow from a text.
fn suffix(text: &str) -> String {
    let digest = Sha256::digest(text.as_bytes());
    let character = |byte: &u8| CHARACTERS.get(usize::from(*byte) % CHARACTERS.len()).copied().map(char::from);
    digest.iter().take(SUFFIX).filter_map(character).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;

    fn names(name: &str, uid: &str, of: Use<'_>) -> Vec<String> {
        let vmi = json!({"metadata": {"name": name, "uid": uid}, "spec": {"domain": {"devices": {}}}});
        pod_names(&serde_json::from_value(vmi).unwrap(), of)
    }

    #[test]
    fn each_use_of_each_vmi_has_names_of_its_own() {
        let uses = [Use::Start, Use::Binding, Use::Migration("m-1"), Use::Migration("m-2")];
        let all: Vec<String> =
            ["u-1", "u-2"].iter().flat_map(|uid| uses.iter().flat_map(|of| names("web", uid, *of))).collect();
        assert_eq!(all.len(), 2 * uses.len() * usize::from(ATTEMPTS));
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len(), "{all:?}");
        for name in &all {
            let suffix = name.strip_prefix("virt-launcher-web-").unwrap();
            assert!(suffix.len() == SUFFIX && suffix.bytes().all(|byte| CHARACTERS.contains(&byte)), "{name}");
        }
        assert_eq!(names("web", "u-1", Use::Start), names("web", "u-1", Use::Start));
    }

    #[test]
    fn names_of_long_vmis_have_63_characters() {
        for length in [1, 43, 44, 63, 64, 253] {
            let found = names(&"a".repeat(length), "u", Use::Start).remove(0);
            assert!(found.len() <= 63, "{found}");
            assert_eq!(found.len(), (14 + length + 1).min(BEGINNING) + SUFFIX, "{found}");
            assert!(found.starts_with("virt-launcher-a"), "{found}");
        }
        // A dot may precede the suffix.
        let dotted = names(&format!("{}.b", "a".repeat(43)), "u", Use::Start).remove(0);
        assert!(dotted.strip_prefix(&format!("virt-launcher-{}.", "a".repeat(43))).is_some(), "{dotted}");
    }
}
