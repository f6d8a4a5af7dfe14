//! Imports between modules, level by level.
//!
//! The modules directly below one parent are a level. An import between two modules counts on the level of the first folder
//! that they do not share: an import of `vmi::decide::status` by `server::console` is one of `vmi` by `server`. A folder and
//! what is inside it are not on one level, so that a parent may use its children and they may use it.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::{Crate, ModulePath};

/// Imports on one level: of each module directly below the parent, with an example of two modules.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Level {
    /// Used modules by user, with an example of an import.
    pub imports: BTreeMap<String, BTreeMap<String, (ModulePath, ModulePath)>>,
}

/// A cycle of imports.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cycle {
    /// The parent of the modules.
    pub parent: ModulePath,
    /// The modules, in alphabetical order.
    pub members: Vec<String>,
    /// An example of each import between them.
    pub examples: Vec<String>,
}

/// Returns the imports of a crate by level.
#[must_use]
pub fn levels(source: &Crate) -> BTreeMap<ModulePath, Level> {
    let mut levels: BTreeMap<ModulePath, Level> = BTreeMap::new();
    for (user, used) in source.imports() {
        let shared = user.iter().zip(&used).take_while(|(left, right)| left == right).count();
        let (Some(from), Some(to)) = (user.get(shared), used.get(shared)) else { continue };
        let level = levels.entry(user[..shared].to_vec()).or_default();
        let example = (user.clone(), used.clone());
        level.imports.entry(from.clone()).or_default().entry(to.clone()).or_insert(example);
    }
    levels
}

/// Returns the cycles of a crate, between folders and between files.
#[must_use]
pub fn cycles(source: &Crate) -> Vec<Cycle> {
    let mut cycles = Vec::new();
    for (parent, level) in levels(source) {
        let graph = level.imports.iter().map(|(user, used)| (user.clone(), used.keys().cloned().collect())).collect();
        for members in components(&graph) {
            let examples = members.iter().flat_map(|user| {
                let used = level.imports.get(user).into_iter().flatten();
                used.filter(|(used, _)| members.contains(used))
                    .map(|(_, (user, used))| format!("{} -> {}", user.join("::"), used.join("::")))
            });
            cycles.push(Cycle { parent: parent.clone(), examples: examples.collect(), members });
        }
    }
    cycles
}

/// The names that each name uses.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// Returns the groups of names that reach each other.
pub(crate) fn components(graph: &Graph) -> Vec<Vec<String>> {
    let reached: BTreeMap<&String, BTreeSet<&String>> = graph.keys().map(|user| (user, reach(graph, user))).collect();
    let mut groups: BTreeSet<Vec<String>> = BTreeSet::new();
    for (user, used) in &reached {
        let both = used.iter().filter(|used| reached.get(*used).is_some_and(|back| back.contains(user)));
        let mut group: Vec<String> = both.map(|name| (*name).clone()).collect();
        group.sort();
        if group.len() > 1 {
            groups.insert(group);
        }
    }
    groups.into_iter().collect()
}

/// Returns the names that `user` reaches.
fn reach<'a>(graph: &'a Graph, user: &str) -> BTreeSet<&'a String> {
    let mut found = BTreeSet::new();
    let mut waiting: Vec<&String> = graph.get(user).into_iter().flatten().collect();
    while let Some(name) = waiting.pop() {
        if found.insert(name) {
            waiting.extend(graph.get(name).into_iter().flatten());
        }
    }
    found
}

/// Returns the imports of items of `lib.rs` or `main.rs` by modules that the file itself reaches by its imports.
#[must_use]
pub fn root_imports(source: &Crate) -> Vec<String> {
    let folder = |module: &ModulePath| module.first().cloned().unwrap_or_default();
    let mut graph = Graph::new();
    let imports = source.imports();
    for (user, used) in &imports {
        graph.entry(folder(user)).or_default().insert(folder(used));
    }
    let reached = reach(&graph, "");
    let circular = imports.iter().filter(|(user, used)| used.is_empty() && reached.contains(&folder(user)));
    circular.map(|(user, _)| user.join("::")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<(String, Vec<String>)> {
        cycles(&Crate::parse(files)).into_iter().map(|cycle| (cycle.parent.join("/"), cycle.members)).collect()
    }

    #[test]
    fn cycles_are_found_on_the_level_where_paths_part() {
        let files = [
            ("a", ""),
            ("a/one", "use crate::b::two::X;"),
            ("b", ""),
            ("b/two", "use crate::c::X;"),
            ("c", "use crate::a::one::X;"),
        ];
        assert_eq!(found(&files), [(String::new(), vec!["a".into(), "b".into(), "c".into()])]);
        let files = [("a", ""), ("a/x", "use super::y::Z;"), ("a/x/in", ""), ("a/y", "use super::x::Z;")];
        assert_eq!(found(&files), [("a".to_owned(), vec!["x".into(), "y".into()])]);
    }

    #[test]
    fn files_count_on_every_level() {
        assert_eq!(found(&[("a", "use crate::b::X;"), ("b", "use crate::a::X;")]).len(), 1);
        let files = [("a", ""), ("a/x", "use super::y::Z;"), ("a/y", "use super::x::Z;")];
        assert_eq!(found(&files), [("a".to_owned(), vec!["x".into(), "y".into()])]);
    }

    #[test]
    fn parents_and_their_files_may_use_each_other() {
        let files = [("a", "use self::x::Z;"), ("a/x", "use super::Z;")];
        assert_eq!(found(&files), []);
    }

    #[test]
    fn imports_of_the_root_by_what_it_imports_are_found() {
        let found = |root: &str| {
            root_imports(&Crate::parse(&[
                ("", root),
                ("a", "use crate::b::X;"),
                ("b", "pub struct X;"),
                ("b/in", "use crate::Root;"),
                ("c", ""),
            ]))
        };
        assert_eq!(found("struct Root; use a::X; mod a; mod b; mod c;"), ["b::in"]);
        assert_eq!(found("struct Root; pub use b::X; mod a; mod b; mod c;"), ["b::in"]);
        assert_eq!(found("struct Root; pub use c::X; mod a; mod b; mod c;"), [""; 0]);
        assert_eq!(found("pub use c::Y as Root; pub use a::X; mod a; mod b; mod c;"), [""; 0]);
    }
}
