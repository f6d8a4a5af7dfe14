//! Settings of virtual hardware: by architecture, and strings of SMBIOS.

use super::overlay_text;
use crate::kubevirt::configuration::{ArchSpecificConfiguration, SmbiosConfiguration};

/// Settings of an architecture with defaults.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ArchConfig {
    /// Default machine type.
    pub machine_type: String,
    /// Allowed machine types, as globs.
    pub emulated_machines: Vec<String>,
    /// Directory of OVMF images.
    pub ovmf_path: String,
}

/// SMBIOS system strings with defaults.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Smbios {
    /// Family.
    pub family: String,
    /// Manufacturer.
    pub manufacturer: String,
    /// Product.
    pub product: String,
    /// Stock keeping unit; empty for none.
    pub sku: String,
    /// Version; empty for none.
    pub version: String,
}

impl Default for Smbios {
    fn default() -> Self {
        Self {
            family: "KubeVirt".to_owned(),
            manufacturer: "KubeVirt".to_owned(),
            product: "None".to_owned(),
            sku: String::new(),
            version: String::new(),
        }
    }
}

impl ArchConfig {
    pub(super) fn new(machine_type: &str, emulated: &[&str], ovmf_path: &str) -> Self {
        Self {
            machine_type: machine_type.to_owned(),
            emulated_machines: emulated.iter().map(|glob| (*glob).to_owned()).collect(),
            ovmf_path: ovmf_path.to_owned(),
        }
    }

    pub(super) fn overlay(&mut self, from: Option<&ArchSpecificConfiguration>) {
        let Some(from) = from else { return };
        overlay_text(&mut self.machine_type, from.machine_type.as_ref());
        overlay_text(&mut self.ovmf_path, from.ovmf_path.as_ref());
        if !from.emulated_machines.is_empty() {
            self.emulated_machines.clone_from(&from.emulated_machines);
        }
    }

    /// Returns true if one of the globs matches a machine type.
    pub fn allows_machine(&self, machine_type: &str) -> bool {
        self.emulated_machines.iter().any(|glob| glob_matches(glob, machine_type))
    }
}

impl Smbios {
    pub(super) fn overlay(&mut self, from: &SmbiosConfiguration) {
        overlay_text(&mut self.family, from.family.as_ref());
        overlay_text(&mut self.manufacturer, from.manufacturer.as_ref());
        overlay_text(&mut self.product, from.product.as_ref());
        overlay_text(&mut self.sku, from.sku.as_ref());
        overlay_text(&mut self.version, from.version.as_ref());
    }
}

/// Returns true if a glob matches. `*` stands for any text and `?` for one character.
fn glob_matches(glob: &str, text: &str) -> bool {
    // Two-pointer algorithm: on a mismatch, the last star matches one more character.
    let (glob, text): (Vec<char>, Vec<char>) = (glob.chars().collect(), text.chars().collect());
    let (mut g, mut t, mut star) = (0, 0, None);
    while t < text.len() {
        if glob.get(g) == Some(&'*') {
            star = Some((g, t));
            g += 1;
        } else if glob.get(g).is_some_and(|c| *c == '?' || *c == text[t]) {
            g += 1;
            t += 1;
        } else if let Some((star_g, star_t)) = star {
            star = Some((star_g, star_t + 1));
            g = star_g + 1;
            t = star_t + 1;
        } else {
            return false;
        }
    }
    glob[g..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_as_in_a_shell() {
        for (glob, text, want) in [
            ("q35*", "q35", true),
            ("pc-q35*", "pc-q35-9.2", true),
            ("q35*", "pc-q35", false),
            ("*-?", "a-b", true),
            ("*a*b", "xaxxb", true),
            ("", "x", false),
        ] {
            assert_eq!(glob_matches(glob, text), want, "{glob} {text}");
        }
    }
}
