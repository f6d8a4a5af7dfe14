//! Paths that documents name, and the parts of documents that are generated.

use std::{
    collections::BTreeSet,
    fmt::Write,
    path::{Path, PathBuf},
};

use crate::{
    Error,
    folders::{Level, levels},
    read,
    source::{Crate, files},
};

/// Returns the documents whose paths must exist: those of the root and those below `docs` except decision records, which
/// describe the state of their day.
///
/// # Errors
/// When a folder cannot be read.
pub fn documents(root: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut found = ["README.md", "CONTRIBUTING.md", "SECURITY.md"].map(|name| root.join(name)).to_vec();
    let mut waiting = vec![root.join("docs")];
    while let Some(folder) = waiting.pop() {
        let failed = |source| Error::File { path: folder.clone(), source };
        for entry in std::fs::read_dir(&folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
            if name == "decisions" {
                continue;
            }
            if path.is_dir() {
                waiting.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the paths that a document names and that do not exist.
///
/// # Errors
/// When the document cannot be read.
pub fn missing_paths(root: &Path, document: &Path) -> Result<Vec<String>, Error> {
    let text = read(document)?;
    let folder = document.parent().unwrap_or(root);
    let links = links(&text).filter(|link| !folder.join(link).exists()).map(str::to_owned);
    let spans = code_spans(&text).filter(|span| is_path(root, span) && !exists(root, span)).map(str::to_owned);
    Ok(links.chain(spans).collect::<BTreeSet<_>>().into_iter().collect())
}

/// Returns the links of a document to headings that do not exist. [`missing_paths`] reports missing documents.
///
/// # Errors
/// When the document cannot be read.
pub fn missing_headings(document: &Path) -> Result<Vec<String>, Error> {
    let text = read(document)?;
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let missing = targets.filter(|target| {
        let Some((path, anchor)) = target.split_once('#').filter(|(path, _)| !path.contains(':')) else { return false };
        let linked = if path.is_empty() { document.to_owned() } else { document.with_file_name(path) };
        linked.extension().is_some_and(|extension| extension == "md")
            && read(&linked).is_ok_and(|text| !anchors(&text).contains(anchor))
    });
    Ok(missing.map(str::to_owned).collect())
}

/// Returns the anchors that GitHub gives to headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let prose = text.split("\n```").step_by(2);
    let headings = prose.flat_map(|part| part.lines().filter(|line| line.starts_with('#')));
    let mut found = BTreeSet::new();
    for heading in headings {
        let title = heading.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
        let anchor: String = title.chars().filter(|c| c.is_alphanumeric() || "-_".contains(*c)).collect();
        let again = (1..).map(|number| format!("{anchor}-{number}"));
        let free = std::iter::once(anchor.clone()).chain(again).find(|name| !found.contains(name));
        found.extend(free);
    }
    found
}

/// Returns the targets of links to files.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
    targets.filter(|target| !target.is_empty() && !target.contains(':') && !target.contains(char::is_whitespace))
}

/// Returns the code spans, without those in blocks of code.
fn code_spans(text: &str) -> impl Iterator<Item = &str> {
    let prose = text.split("```").step_by(2);
    prose.flat_map(|part| part.split('`').skip(1).step_by(2))
}

/// Folder of what builds and tests write.
const BUILT: &str = "build";

/// Returns true for a code span that names a file or folder of the workspace: its first part is a folder at the root, and not that
/// of built files, which a fresh clone does not have.
fn is_path(root: &Path, span: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/_-.".contains(c);
    let Some((first, rest)) = span.split_once('/') else { return false };
    span.chars().all(plain)
        && !first.is_empty()
        && !first.starts_with('.')
        && (rest.is_empty() || !rest.starts_with('/'))
        && {
            // `kubevirt.io/vm` is a name, `api/` a folder.
            !first.contains('.') && first != BUILT && root.join(first).is_dir()
        }
}

/// Returns true when a path exists, as it is or below the `src` of its crate.
fn exists(root: &Path, span: &str) -> bool {
    let span = span.trim_end_matches('/');
    let in_source = || {
        let (first, rest) = span.split_once('/')?;
        Some(root.join(first).join("src").join(rest))
    };
    let there = |path: PathBuf| {
        path.exists()
            || path.with_extension("rs").exists()
            || path.parent().is_some_and(|p| {
                path.file_name().is_some_and(|name| p.join(format!("{}.rs", name.to_string_lossy())).exists())
            })
    };
    there(root.join(span)) || in_source().is_some_and(there)
}

/// Returns the graph of the module folders of some crates as text: each with the folders that it imports, users first.
///
/// # Errors
/// When a crate cannot be read.
pub fn folder_graph(root: &Path, crates: &[&str]) -> Result<String, Error> {
    let mut text = String::from("```\n");
    for name in crates {
        let source = Crate::read(&root.join(name).join("src"))?;
        let level = levels(&source).remove(&Vec::new()).unwrap_or_default();
        let modules: BTreeSet<String> =
            source.modules().filter_map(|module| module.first()).filter(|module| *module != "bin").cloned().collect();
        let _ = writeln!(text, "{name}");
        for module in order(&level, &modules) {
            let used: Vec<&str> =
                level.imports.get(&module).into_iter().flat_map(|used| used.keys()).map(String::as_str).collect();
            let arrow = if used.is_empty() { "" } else { " -> " };
            let _ = writeln!(text, "  {module}{arrow}{}", used.join(", "));
        }
    }
    text.push_str("```");
    Ok(text)
}

/// Returns a table of the folders of some crates, each with the first sentence of its documentation.
///
/// # Errors
/// When a file cannot be read.
pub fn folder_table(root: &Path, crates: &[&str]) -> Result<String, Error> {
    let mut text = String::from("\n| folder | content |\n|---|---|\n");
    for name in crates {
        for file in files(&root.join(name).join("src"))?.iter().filter(|file| file.ends_with("mod.rs")) {
            let folder = file.parent().and_then(|folder| folder.strip_prefix(root).ok()).unwrap_or(root);
            let _ = writeln!(text, "| `{}/` | {} |", folder.display(), first_sentence(&read(file)?));
        }
    }
    Ok(text)
}

/// Returns the first sentence of a module's documentation, without links.
fn first_sentence(text: &str) -> String {
    let lines = text.lines().map_while(|line| line.strip_prefix("//!")).map(str::trim);
    let paragraph = lines.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    let sentence = paragraph.split_once(". ").map_or(paragraph.as_str(), |(first, _)| first).trim_end_matches('.');
    let mut parts = sentence.split("](");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    parts.for_each(|part| plain += part.split_once(')').map_or("", |(_, rest)| rest));
    plain.replace("[`", "`").replace("`]", "`").replace('|', "\\|")
}

/// Returns the modules with each user before what it uses, by name where that leaves a choice.
fn order(level: &Level, modules: &BTreeSet<String>) -> Vec<String> {
    let mut left = modules.clone();
    let mut ordered = Vec::new();
    while !left.is_empty() {
        let used_by_others = |module: &String| {
            left.iter()
                .any(|user| user != module && level.imports.get(user).is_some_and(|used| used.contains_key(module)))
        };
        // In a cycle there is none that nobody uses.
        let next = left.iter().find(|module| !used_by_others(module)).or_else(|| left.first()).cloned();
        let Some(next) = next else { break };
        left.remove(&next);
        ordered.push(next);
    }
    ordered
}

/// Replaces the part `name` of a document by `generated`. With `renew` false, only returns true if the part is current.
///
/// # Errors
/// When the document cannot be read or written, or has no markers of the part.
pub fn renew(document: &Path, name: &str, generated: &str, renew: bool) -> Result<bool, Error> {
    let (begin, end) = (format!("<!-- {name}: make docs -->"), format!("<!-- /{name} -->"));
    renew_between(document, (&begin, &end), &format!("{generated}\n"), renew)
}

/// Does the same for the lines between the first line that ends with `begin` and the next `end`.
///
/// # Errors
/// When the file cannot be read or written, or lacks the markers.
pub fn renew_between(document: &Path, (begin, end): (&str, &str), generated: &str, renew: bool) -> Result<bool, Error> {
    let text = read(document)?;
    let missing = || Error::Markers { path: document.to_owned(), begin: begin.to_owned(), end: end.to_owned() };
    let (before, rest) = text.split_once(begin).ok_or_else(missing)?;
    let (_, after) = rest.split_once(end).ok_or_else(missing)?;
    let renewed = format!("{before}{begin}\n{generated}{end}{after}");
    if renew && renewed != text {
        std::fs::write(document, &renewed).map_err(|source| Error::File { path: document.to_owned(), source })?;
    }
    Ok(renew || renewed == text)
}

/// A row of the status table.
#[derive(Debug, PartialEq, Eq)]
pub struct Status {
    /// First column.
    pub area: String,
    /// State, as "works".
    pub state: String,
    /// Names of stories.
    pub stories: Vec<String>,
}

/// Returns the rows of the table with the columns area, state and tests.
#[must_use]
pub fn status_rows(text: &str) -> Vec<Status> {
    let table = text.lines().skip_while(|line| *line != "| area | state | tests |").skip(2);
    let rows = table.take_while(|line| line.starts_with('|')).filter_map(|line| {
        let mut cells = line.trim_matches('|').split(" | ").map(str::trim);
        let (area, state, stories) = (cells.next()?, cells.next()?, cells.next()?);
        let stories = stories.split('`').skip(1).step_by(2).map(str::to_owned).collect();
        Some(Status { area: area.to_owned(), state: state.to_owned(), stories })
    });
    rows.collect()
}

/// A decision record.
#[derive(Debug)]
pub struct Record {
    /// Name of the file, which begins with the date.
    pub file: String,
    /// Title.
    pub title: String,
    /// Missing sections.
    pub missing: Vec<&'static str>,
}

/// Returns the decision records by name, which is by date.
///
/// # Errors
/// When a record cannot be read.
pub fn records(root: &Path) -> Result<Vec<Record>, Error> {
    let folder = root.join("docs/decisions");
    let failed = |source| Error::File { path: folder.clone(), source };
    let mut records = Vec::new();
    for entry in std::fs::read_dir(&folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if file == "README.md" {
            continue;
        }
        let text = read(&path)?;
        let sections = ["# ", "Status: ", "## Context", "## Decision", "## Consequence", "## Figure"];
        let absent = |section: &&str| !text.lines().any(|line| line.starts_with(*section));
        let title = text.lines().find_map(|line| line.strip_prefix("# ")).unwrap_or_default().to_owned();
        records.push(Record { file, title, missing: sections.into_iter().filter(absent).collect() });
    }
    records.sort_by(|a, b| a.file.cmp(&b.file));
    Ok(records)
}

/// Returns the rows of the records as a table.
#[must_use]
pub fn record_table(records: &[Record]) -> String {
    let mut text = String::from("\n| date | record |\n|---|---|\n");
    for Record { file, title, .. } in records {
        let date = file.get(..10).unwrap_or_default();
        let _ = writeln!(text, "| {date} | [{title}]({file}) |");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_and_code_spans_are_found() {
        let text = "see [a](b.md#part), [c](https://x.io/d) and `api/src`\n```\n`no/span`\n```\nand `node/server`.";
        assert_eq!(links(text).collect::<Vec<_>>(), ["b.md"]);
        assert_eq!(code_spans(text).collect::<Vec<_>>(), ["api/src", "node/server"]);
    }

    #[test]
    fn first_sentences_have_no_links() {
        for (text, expected) in [
            ("//! Reads [`a`](super::a) and\n//! [`b`]: first. Then more.\n\nmod x;", "Reads `a` and `b`: first"),
            ("//! One line.\nuse x;", "One line"),
            ("mod x;", ""),
        ] {
            assert_eq!(first_sentence(text), expected);
        }
    }

    #[test]
    fn anchors_are_those_of_github() {
        let text = "# A `b`, c-d\n```console\n# no heading\n```\n## Again\n### Again\n";
        assert_eq!(anchors(text).into_iter().collect::<Vec<_>>(), ["a-b-c-d", "again", "again-1"]);
    }

    #[test]
    fn status_rows_have_stories() {
        let text = "| x |\n\n| area | state | tests |\n|---|---|---|\n| `a` | works; b | `one`, `two` |\n| c | not yet | – |\n\nend";
        let row = |area: &str, state: &str, stories: &[&str]| Status {
            area: area.into(),
            state: state.into(),
            stories: stories.iter().map(|&name| name.to_owned()).collect(),
        };
        assert_eq!(status_rows(text), [row("`a`", "works; b", &["one", "two"]), row("c", "not yet", &[])]);
    }

    #[test]
    fn paths_are_told_from_names() {
        let root = crate::root();
        for (span, path, there) in [
            ("layout/src/lib.rs", true, true),
            ("layout/documents.rs", true, true),
            ("layout/documents", true, true),
            ("layout/gone.rs", true, false),
            ("layout/", true, true),
            ("kubevirt.io/vm", false, false),
            ("spec/domain", false, false),
            ("cargo", false, false),
            // There after a build.
            ("build/release", false, false),
        ] {
            assert_eq!(is_path(&root, span), path, "{span}");
            assert_eq!(path && exists(&root, span), there, "{span}");
        }
    }

    #[test]
    fn users_come_before_what_they_use() {
        let source = Crate::parse(&[("a", ""), ("b", "use crate::c::X;"), ("c", "use crate::a::X;")]);
        let level = levels(&source).remove(&Vec::new()).unwrap();
        let modules = ["a", "b", "c"].map(str::to_owned).into();
        assert_eq!(order(&level, &modules), ["b", "c", "a"]);
    }
}
