//! RELEASE_NOTES.md.

use std::fmt::Write;

/// Returns the notes: changes, images with digests, and the changed rights if a former release was given.
pub(super) fn text(version: &str, images: &[(String, String)], changelog: &str, rights: Option<&str>) -> String {
    let mut text = format!("# Ferrovirt {version}\n");
    // Writing to a string cannot fail.
    if let Some(changes) = changes(changelog, version) {
        let _ = write!(text, "\n## Changes\n\n{changes}\n");
    }
    text.push_str("\n## Images\n\n| image | digest |\n|---|---|\n");
    for (image, digest) in images {
        let _ = writeln!(text, "| `{image}` | `{digest}` |");
    }
    if let Some(rights) = rights {
        let _ = write!(
            text,
            "\n## Rights\n\nRules of roles that differ from the former release, hooks included.\n\n{rights}"
        );
    }
    text
}

/// Returns the section of a version in the changelog, or that of what is not released yet, one level deeper.
fn changes(changelog: &str, version: &str) -> Option<String> {
    let section = |name: &str| {
        let heading = format!("## [{name}]");
        let mut lines = changelog.lines().skip_while(|line| !line.starts_with(&heading));
        lines.next()?;
        let text: Vec<&str> = lines.take_while(|line| !line.starts_with("## ")).collect();
        let text = text.join("\n").trim().to_owned();
        (!text.is_empty()).then_some(text)
    };
    section(version).or_else(|| section("Unreleased"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHANGELOG: &str = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- b\n\n## [0.1.0] - 2026-11-26\n\n- a\n";

    #[test]
    fn changes_are_those_of_the_version() {
        let cases = [("0.1.0", Some("- a")), ("0.2.0", Some("### Added\n\n- b"))];
        for (version, expected) in cases {
            assert_eq!(changes(CHANGELOG, version).as_deref(), expected, "{version}");
        }
        assert_eq!(changes("# Changelog\n", "0.1.0"), None);
    }

    #[test]
    fn rights_appear_if_they_were_compared() {
        let images = [("r/virt-api:1".to_owned(), "sha256:aa".to_owned())];
        let without = text("0.1.0", &images, CHANGELOG, None);
        assert!(without.contains("| `r/virt-api:1` | `sha256:aa` |\n") && !without.contains("## Rights"));
        assert!(
            text("0.1.0", &images, CHANGELOG, Some("No role has changed.\n"))
                .ends_with("included.\n\nNo role has changed.\n")
        );
    }
}
