//! The structure of the workspace as it is.

use std::collections::BTreeSet;

use layout::{
    crates, documents,
    folders::{Cycle, cycles, root_imports},
    lists, methods, root,
    source::Crate,
    sources,
};

/// Crates whose folders `docs/architecture.md` shows.
const SHOWN: &[&str] =
    &["api", "daemon", "admission", "controllers", "apiserver", "node", "launcher", "importer", "cli"];

/// Crates whose cycles are still to be removed.
const KNOWN: &[&str] = &[];

/// Types whose methods call each other in a circle of more than three files, still to be divided.
const KNOWN_CIRCLES: &[&str] = &[];

/// Crates whose `lib.rs` defines what the modules import that it imports, still to be moved.
const KNOWN_ROOTS: &[&str] = &[];

/// Files that consist of tables.
const TABLES: &[&str] = &[
    "api/src/constants.rs",
    "api/tests/definitions.rs",
    "controllers/src/vm/tests/changes.rs",
    "e2e/tests/tests/e2e/controller_rights.rs",
    "node/src/vmi/decide/tests/migration.rs",
];

/// Returns true if a story with its modules has this name.
fn is_named(story: &str, name: &str) -> bool {
    story.rsplit("::").next() == Some(name)
}

fn describe(cycle: &Cycle) -> String {
    let parent = if cycle.parent.is_empty() { "src".to_owned() } else { cycle.parent.join("/") };
    format!("in {parent}: {}\n    {}", cycle.members.join(", "), cycle.examples.join("\n    "))
}

#[test]
fn module_folders_of_a_crate_import_each_other_one_way() {
    let mut found = Vec::new();
    for name in crates::dependencies(&root()).unwrap().keys() {
        let source = Crate::read(&root().join(name).join("src")).unwrap();
        let cycles: Vec<String> = cycles(&source).iter().map(|cycle| format!("{name} {}", describe(cycle))).collect();
        if KNOWN.contains(&name.as_str()) {
            println!("known: {}", cycles.join("\n"));
        } else {
            found.extend(cycles);
        }
    }
    assert!(found.is_empty(), "cycles of imports:\n{}", found.join("\n"));
}

#[test]
fn methods_of_a_type_in_several_files_call_each_other_one_way() {
    let mut found = Vec::new();
    for name in crates::dependencies(&root()).unwrap().keys() {
        let source = Crate::read(&root().join(name).join("src")).unwrap();
        let circles = methods::circles(&source).into_iter();
        found.extend(circles.map(|circle| (format!("{name} {}", circle.name), circle.examples.join("\n    "))));
    }
    found.retain(|(name, _)| !KNOWN_CIRCLES.contains(&name.as_str()));
    let found: Vec<String> = found.into_iter().map(|(name, calls)| format!("{name}\n    {calls}")).collect();
    assert!(found.is_empty(), "circles of calls on self:\n{}", found.join("\n"));
}

#[test]
fn modules_that_lib_rs_imports_do_not_import_its_items() {
    let mut found = Vec::new();
    for name in crates::dependencies(&root()).unwrap().keys() {
        let src = root().join(name).join("src");
        if src.join("lib.rs").exists() && !KNOWN_ROOTS.contains(&name.as_str()) {
            let imports = root_imports(&Crate::read(&src).unwrap()).into_iter();
            found.extend(imports.map(|module| format!("{name} {module}")));
        }
    }
    assert!(found.is_empty(), "imports of items that lib.rs defines:\n{}", found.join("\n"));
}

#[test]
fn files_are_short() {
    let root = root();
    let mut found: Vec<String> = Vec::new();
    for (path, text) in sources::sources(&root).unwrap() {
        let path = path.strip_prefix(&root).unwrap().display().to_string();
        let lines = sources::too_long(&text).filter(|_| !TABLES.contains(&path.as_str()));
        found.extend(lines.map(|lines| format!("{path}: {lines}")));
    }
    assert!(found.is_empty(), "files with more than {} lines:\n{}", sources::MOST_LINES, found.join("\n"));
}

#[test]
fn crates_depend_on_those_below_them() {
    let violations = crates::violations(&crates::dependencies(&root()).unwrap());
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}

#[test]
fn paths_that_documents_name_exist() {
    let root = root();
    let mut missing = Vec::new();
    for document in documents::documents(&root).unwrap() {
        let paths = documents::missing_paths(&root, &document).unwrap();
        let headings = documents::missing_headings(&document).unwrap();
        missing.extend(paths.into_iter().chain(headings).map(|path| format!("{}: {path}", document.display())));
    }
    assert!(missing.is_empty(), "paths that do not exist:\n{}", missing.join("\n"));
}

#[test]
fn graph_of_folders_is_current() {
    let root = root();
    let graph = documents::folder_graph(&root, SHOWN).unwrap();
    let renew = std::env::var_os("RENEW").is_some();
    let current = documents::renew(&root.join("docs/architecture.md"), "folders", &graph, renew).unwrap();
    assert!(current, "docs/architecture.md is stale: run `make docs`");
}

#[test]
fn table_of_folders_is_current_and_each_has_a_description() {
    let root = root();
    let table = documents::folder_table(&root, SHOWN).unwrap();
    let bare: Vec<&str> = table.lines().filter(|line| line.ends_with("|  |")).collect();
    assert!(bare.is_empty(), "folders whose mod.rs has no documentation:\n{}", bare.join("\n"));
    let renew = std::env::var_os("RENEW").is_some();
    let current = documents::renew(&root.join("docs/architecture.md"), "content", &table, renew).unwrap();
    assert!(current, "docs/architecture.md is stale: run `make docs`");
}

#[test]
fn status_rows_that_work_name_stories_of_which_one_is_a_core_story() {
    let root = root();
    let stories = lists::tests(&root.join("e2e/tests/tests/e2e")).unwrap();
    let core = std::fs::read_to_string(root.join("e2e/core-stories.txt")).unwrap();
    let core: BTreeSet<&str> = core.lines().filter(|line| !line.starts_with('#')).collect();
    let rows = documents::status_rows(&std::fs::read_to_string(root.join("docs/reference/status.md")).unwrap());
    assert!(rows.len() > 20, "{} rows of the status table", rows.len());
    let mut wrong: Vec<String> = core
        .iter()
        .filter(|name| !stories.contains(**name))
        .map(|name| format!("e2e/core-stories.txt: there is no story {name}"))
        .collect();
    for row in rows {
        if row.state.to_lowercase().contains("works") && row.stories.is_empty() {
            wrong.push(format!("{}: no story", row.area));
        }
        let is_in_shares = row.state.contains("in shares");
        let has_core = row.stories.iter().any(|name| core.iter().any(|story| is_named(story, name)));
        if !row.stories.is_empty() && has_core == is_in_shares {
            wrong.push(format!(
                "{}: either one of its stories is in e2e/core-stories.txt, or its state says in shares",
                row.area
            ));
        }
        let is_missing = |name: &&String| !stories.iter().any(|story| is_named(story, name));
        wrong.extend(
            row.stories.iter().filter(is_missing).map(|name| format!("{}: there is no story {name}", row.area)),
        );
    }
    assert!(wrong.is_empty(), "docs/reference/status.md:\n{}", wrong.join("\n"));
}

#[test]
fn tests_are_skipped_only_by_the_helper_and_each_accepted_need_is_one_of_a_test() {
    let sources = sources::sources(&root()).unwrap();
    let (mut own, mut calls) = (Vec::new(), String::new());
    for (path, text) in &sources {
        own.extend(sources::own_skips(text).map(|line| format!("{}: {line}", path.display())));
        calls.push_str(text);
    }
    assert!(own.is_empty(), "tests call skips::skip before they return early:\n{}", own.join("\n"));
    for (need, _) in skips::ACCEPTED {
        let name = need.strip_prefix(skips::FOREIGN_CLUSTER).unwrap_or(need);
        assert!(
            calls.contains(&format!("skip(\"{name}\")")),
            "no test skips for {need}: remove it from skips/src/lib.rs"
        );
    }
}
