//! The question to the program of an attachment pod, and its answer.
//!
//! virt-handler sends the UID of a VMI and the name of a volume in one line. The program answers with one line and closes the
//! connection. It knows both from virt-controller, which created the pod.

/// Most bytes of a question: a UID and a DNS label, with margin.
pub const MAX_QUESTION: u64 = 256;
/// Answer: the pod holds this volume of this VMI.
pub const HELD: &str = "held\n";
/// Answer: the pod holds another volume, or one of another VMI.
pub const FOREIGN: &str = "foreign\n";

/// Returns the question for a volume of a VMI.
pub fn question(vmi: &str, volume: &str) -> String {
    format!("{vmi} {volume}\n")
}

/// Volumes that an attachment pod holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// UID of the VMI.
    pub vmi: String,
    /// Names of its volumes.
    pub volumes: Vec<String>,
}

impl Held {
    /// Returns the answer to a question.
    pub fn answer(&self, question: &str) -> &'static str {
        let asked = question.strip_suffix('\n').and_then(|line| line.split_once(' '));
        let is_held = |(vmi, volume): (&str, &str)| {
            !vmi.is_empty() && vmi == self.vmi && self.volumes.iter().any(|held| held == volume)
        };
        if asked.is_some_and(is_held) { HELD } else { FOREIGN }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attachment_pod_answers_for_its_own_volumes_only() {
        let held = Held { vmi: "u1".to_owned(), volumes: vec!["a".to_owned(), "b".to_owned()] };
        for (asked, answer) in [
            (question("u1", "a"), HELD),
            (question("u1", "b"), HELD),
            (question("u1", "c"), FOREIGN),
            (question("u2", "a"), FOREIGN),
            (question("", "a"), FOREIGN),
            (question("u1", ""), FOREIGN),
            ("u1 a".to_owned(), FOREIGN),
            ("u1 a b\n".to_owned(), FOREIGN),
            (String::new(), FOREIGN),
        ] {
            assert_eq!(held.answer(&asked), answer, "{asked:?}");
        }
        assert_eq!(Held::default().answer(&question("", "")), FOREIGN, "a pod that knows no VMI");
    }
}
