//! Optional features, exchanged in both Hellos, so that releases of virt-handler and virt-launcher can work together.

use std::collections::BTreeSet;

/// Most names that are read of a Hello. Later names are ignored.
const MAX_FEATURES: usize = 64;

/// Declares the features, each with its name in a Hello.
macro_rules! features {
    ($($(#[doc = $text:literal])* $feature:ident = $name:literal,)*) => {
        /// An optional feature of the protocol. A feature that every supported release has is removed from this list.
        #[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
        pub enum Feature {
            $($(#[doc = $text])* $feature,)*
        }

        impl Feature {
            /// All features of this release.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$feature),*];

            /// Returns the name in a Hello.
            pub fn name(self) -> &'static str {
                match self { $(Self::$feature => $name,)* }
            }
        }
    };
}

features! {
    /// `LauncherState.items`: the result of the last Sync for each part of the domain.
    ItemResults = "item-results",
    /// Domains that can grow: `maxSockets` and `maxGuest` of the spec, `LauncherState.vcpus` and `.memory_requested`.
    LiveResize = "live-resize",
    /// Interfaces of a running domain come and go: `LauncherState.nics`.
    NicHotplug = "nic-hotplug",
    /// `DumpMemory`.
    MemoryDump = "memory-dump",
    /// `PrepareMigration`, `Migrate` and `AbortMigration`, with the channels of the migration socket.
    LiveMigration = "live-migration",
    /// `StartJob`, `AbortJob` and `LauncherState.jobs`. The calls that start or abort one kind of job are for older releases.
    Jobs = "jobs",
    /// The job `memory_save`, and starts from saved memory.
    MemorySave = "memory-save",
}

/// Returns the names of all features of this release, for a Hello.
pub fn own() -> Vec<String> {
    Feature::ALL.iter().map(|feature| feature.name().to_owned()).collect()
}

/// Returns the features that the other side has in common with this release. Unknown names are features of a later release.
pub fn common(names: &[String]) -> BTreeSet<Feature> {
    let names = &names[..names.len().min(MAX_FEATURES)];
    Feature::ALL.into_iter().filter(|feature| names.iter().any(|name| name == feature.name())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_of_other_releases_are_ignored() {
        assert_eq!(common(&own()), Feature::ALL.into_iter().collect());
        assert_eq!(common(&["of-tomorrow".into(), "item-results".into()]), [Feature::ItemResults].into());
        assert_eq!(common(&[]), BTreeSet::new());
    }

    #[test]
    fn a_long_list_is_cut() {
        let mut names: Vec<String> = (0..MAX_FEATURES).map(|n| format!("feature-{n}")).collect();
        names.push("item-results".into());
        assert_eq!(common(&names), BTreeSet::new());
    }
}
