//! Selects the stories that test changed files.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};

/// Folder of the stories.
const STORIES: &str = "e2e/tests/tests/e2e/";
/// Stands for the core stories in the map.
const CORE: &str = "core";
/// Stands for no story in the map.
const NONE: &str = "-";

/// Prefixes of paths, each with the modules whose stories test it.
#[derive(Debug)]
pub(crate) struct Map(BTreeMap<String, Vec<String>>);

impl Map {
    /// Parses lines of a prefix and modules, separated by white space. `#` begins a comment.
    ///
    /// # Errors
    /// Fails for a prefix without modules or with two lines.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut rows = BTreeMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let mut words = line.split_whitespace().map(str::to_owned);
            let Some(prefix) = words.next() else { continue };
            let mut modules: Vec<String> = words.collect();
            ensure!(!modules.is_empty(), "{prefix} has no modules");
            modules.retain(|module| module != NONE);
            let former = rows.insert(prefix, modules);
            former.is_none().then_some(()).with_context(|| format!("two lines have the prefix of {line:?}"))?;
        }
        Ok(Self(rows))
    }

    /// Returns the stories that test the files at these paths. A changed story is tested by all stories of its module, another file
    /// as the longest prefix of its path says, and one without a prefix by the core stories.
    pub(crate) fn stories<'a>(
        &self,
        paths: impl Iterator<Item = &'a str>,
        stories: &BTreeSet<String>,
        core: &BTreeSet<String>,
    ) -> BTreeSet<String> {
        let mut modules = BTreeSet::new();
        for path in paths {
            let own = path
                .strip_prefix(STORIES)
                .and_then(|path| path.strip_suffix(".rs"))
                .map(|path| path.strip_suffix("/mod").unwrap_or(path).replace('/', "::"));
            let own = own.filter(|module| stories.iter().any(|name| is_in(name, module)));
            match own {
                Some(module) => drop(modules.insert(module)),
                None => modules.extend(self.modules(path).iter().cloned()),
            }
        }
        let is_tested = |name: &&String| {
            modules.iter().any(|module| is_in(name, module)) || modules.contains(CORE) && core.contains(*name)
        };
        stories.iter().filter(is_tested).cloned().collect()
    }

    fn modules(&self, path: &str) -> Vec<String> {
        let longest = self.0.iter().filter(|(prefix, _)| path.starts_with(prefix.as_str()));
        let longest = longest.max_by_key(|(prefix, _)| prefix.len());
        longest.map_or_else(|| vec![CORE.to_owned()], |(_, modules)| modules.clone())
    }
}

/// Returns true if a story belongs to a module or to one below it.
fn is_in(story: &str, module: &str) -> bool {
    story.strip_prefix(module).is_some_and(|rest| rest.starts_with("::"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const STORIES: &[&str] =
        &["admission::vms::refused", "boot::console", "boot_order::two", "disks::all", "nics::plug"];

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn changed_files_select_stories() {
        let map =
            Map::parse("# comment\n\nnode/ boot disks\nnode/src/network/ nics\ndocs/ -\ncli/src/a.rs core nics\n");
        let map = map.unwrap();
        for (paths, expected) in [
            (&[][..], &[][..]),
            (&["node/src/main.rs"], &["boot::console", "disks::all"]),
            (&["node/src/network/mac.rs"], &["nics::plug"]),
            (&["docs/x.md"], &[]),
            (&["docs/x.md", "node/src/network/mac.rs"], &["nics::plug"]),
            (&["cli/src/a.rs"], &["disks::all", "nics::plug"]),
            // Without a prefix, and helpers of stories.
            (&["launcher/src/main.rs"], &["disks::all"]),
            (&["e2e/tests/tests/e2e/witness.rs"], &["disks::all"]),
            // Changed stories.
            (&["e2e/tests/tests/e2e/boot.rs"], &["boot::console"]),
            (&["e2e/tests/tests/e2e/admission/vms.rs"], &["admission::vms::refused"]),
            (&["e2e/tests/tests/e2e/admission/mod.rs"], &["admission::vms::refused"]),
        ] {
            let selected = map.stories(paths.iter().copied(), &set(STORIES), &set(&["disks::all"]));
            assert_eq!(selected, set(expected), "{paths:?}");
        }
    }

    #[test]
    fn wrong_maps_are_refused() {
        for (text, reason) in
            [("node/\n", "node/ has no modules"), ("a x\na y\n", "two lines have the prefix of \"a y\"")]
        {
            assert_eq!(Map::parse(text).unwrap_err().to_string(), reason);
        }
    }

    #[test]
    fn map_names_paths_and_modules_that_exist() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let map = Map::parse(&std::fs::read_to_string(root.join(crate::MAP)).unwrap()).unwrap();
        for (prefix, modules) in &map.0 {
            assert!(root.join(prefix).exists(), "{prefix} does not exist");
            for module in modules.iter().filter(|module| *module != CORE) {
                let path = root.join(super::STORIES).join(module.replace("::", "/"));
                let exists = path.with_extension("rs").exists() || path.join("mod.rs").exists();
                assert!(exists, "{prefix}: there is no module {module}");
            }
        }
    }
}
