//! Selects the files of an image from an unpacked Debian root.
//!
//! An image contains its listed files and the libraries in the dynamic sections of its programs. A library or symbol version
//! that the root lacks fails the build; the container would otherwise fail to start. Each package that contributes a file
//! also contributes its control data, for image scanners, and its copyright file.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fs,
    path::Path,
};

use crate::{
    error::{At, Error, Result},
    object::{self, Object},
    packages::Root,
    tree::{Content, Source, Tree},
};

/// Default library directories of the dynamic loader.
const LIBRARY_DIRS: [&str; 2] = ["usr/lib/x86_64-linux-gnu", "usr/lib"];

/// Top-level links of a merged-`/usr` system, present in every image.
const TOP_LINKS: [&str; 4] = ["bin", "sbin", "lib", "lib64"];

/// Limits links followed for one path.
const MAX_LINKS: usize = 16;

/// Returns the entries of `root` that match `patterns` (a path, optionally with `*` in its last part; directories include all
/// below), except those that start with one of `except`, and the libraries needed by them and by the files of `programs`. Files of
/// `placeholders` replace those of the root.
pub(crate) fn select(
    root: &Root,
    patterns: &[&str],
    except: &[&str],
    programs: &Tree,
    placeholders: Tree,
) -> Result<Tree> {
    let mut picked = Picked { root: &root.path, except, placeholders, tree: Tree::default() };
    for link in TOP_LINKS {
        picked.tree.take(&root.path, link)?;
    }
    for pattern in patterns {
        picked.pattern(pattern)?;
    }
    picked.libraries(programs)?;
    let mut tree = picked.tree;
    tree.extend(picked.placeholders);
    add_package_data(root, &mut tree)?;
    Ok(tree)
}

struct Picked<'a> {
    root: &'a Path,
    except: &'a [&'a str],
    placeholders: Tree,
    tree: Tree,
}

impl Picked<'_> {
    fn pattern(&mut self, pattern: &str) -> Result<()> {
        let none = || Error::NothingSelected { pattern: pattern.to_owned(), root: self.root.to_owned() };
        let Some((before, after)) = pattern.split_once('*') else {
            if fs::symlink_metadata(self.root.join(pattern)).is_err() {
                return Err(none());
            }
            return self.add(pattern);
        };
        let (dir, prefix) = before.rsplit_once('/').unwrap_or(("", before));
        let mut names = list(&self.root.join(dir))?;
        names.retain(|name| {
            name.len() >= prefix.len() + after.len() && name.starts_with(prefix) && name.ends_with(after)
        });
        if names.is_empty() {
            return Err(none());
        }
        names.iter().try_for_each(|name| self.add(&format!("{dir}/{name}")))
    }

    /// Adds an entry, everything below it, and its link targets.
    fn add(&mut self, path: &str) -> Result<()> {
        if self.except.iter().any(|except| path.starts_with(except)) {
            return Ok(());
        }
        let mut path = path.to_owned();
        for _ in 0..MAX_LINKS {
            self.tree.take(self.root, &path)?;
            match self.tree.get(&path).map(|node| node.content.clone()) {
                Some(Content::Link(target)) => path = follow(&path, &target),
                Some(Content::Dir) => {
                    for name in list(&self.root.join(&path))? {
                        self.add(&format!("{path}/{name}"))?;
                    }
                    return Ok(());
                }
                _ => return Ok(()),
            }
        }
        Err(Error::Layout(path, "too many links".to_owned()))
    }

    /// Adds the libraries of all programs in the tree and in `programs`, recursively.
    fn libraries(&mut self, programs: &Tree) -> Result<()> {
        let mut known: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut open = VecDeque::new();
        for (path, node) in programs.iter().chain(self.tree.iter()) {
            if let Content::File(Source::Disk(_)) = &node.content
                && let Some(object) = read_object(path, &node.content)?
            {
                open.push_back((path.to_owned(), object));
            }
        }
        let mut wanted = Vec::new();
        let mut done = BTreeSet::new();
        while let Some((path, object)) = open.pop_front() {
            if !done.insert(path.clone()) {
                continue;
            }
            let name = path.rsplit('/').next().unwrap_or(&path).to_owned();
            if let Some(interpreter) = &object.interpreter {
                // The kernel opens the interpreter under exactly this path.
                self.add(&normalize(interpreter))?;
            }
            for library in &object.needed {
                let at = self.find(&path, &object, library)?;
                if let Some(node) = self.placeholders.get(&at) {
                    let versions = read_object(&at, &node.content)?.unwrap_or_default().versions;
                    known.insert(library.clone(), versions);
                    continue;
                }
                self.add(&at)?;
                let real = self.real(&at);
                if let Some(node) = self.tree.get(&real)
                    && let Some(found) = read_object(&real, &node.content)?
                {
                    known.insert(library.clone(), found.versions.clone());
                    open.push_back((real, found));
                }
            }
            wanted
                .extend(object.needed_versions.into_iter().map(|(library, version)| (name.clone(), library, version)));
        }
        for (object, library, version) in wanted {
            if known.get(&library).is_some_and(|versions| !versions.contains(&version)) {
                return Err(Error::LibraryTooOld { object, library, version });
            }
        }
        Ok(())
    }

    fn find(&self, path: &str, object: &Object, library: &str) -> Result<String> {
        let origin = path.rsplit_once('/').map_or("", |(dir, _)| dir);
        let own = object.search.iter().map(|dir| normalize(&dir.replace("$ORIGIN", &format!("/{origin}"))));
        own.chain(LIBRARY_DIRS.map(str::to_owned))
            .map(|dir| format!("{dir}/{library}"))
            .find(|candidate| self.root.join(candidate).exists())
            .ok_or_else(|| Error::LibraryMissing { object: path.to_owned(), library: library.to_owned() })
    }

    /// Resolves links in the last part of a path.
    fn real(&self, path: &str) -> String {
        let mut path = path.to_owned();
        for _ in 0..MAX_LINKS {
            match self.tree.get(&path).map(|node| &node.content) {
                Some(Content::Link(target)) => path = follow(&path, target),
                _ => break,
            }
        }
        path
    }
}

fn list(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).at(dir)? {
        names.push(entry.at(dir)?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

fn read_object(path: &str, content: &Content) -> Result<Option<Object>> {
    let Content::File(source) = content else { return Ok(None) };
    let bytes = source.read()?;
    if !object::is_elf(&bytes) {
        return Ok(None);
    }
    object::parse(&bytes).map(Some).map_err(|source| Error::Elf { object: path.to_owned(), source })
}

/// Returns a path without `.` and `..`, without leading slash, in merged-`/usr` form.
pub(crate) fn normalize(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    if parts.len() > 1 && TOP_LINKS.contains(&parts[0]) {
        parts.insert(0, "usr");
    }
    parts.join("/")
}

fn follow(link: &str, target: &str) -> String {
    if target.starts_with('/') {
        return normalize(target);
    }
    let dir = link.rsplit_once('/').map_or("", |(dir, _)| dir);
    normalize(&format!("{dir}/{target}"))
}

/// Adds `var/lib/dpkg/status.d/NAME` and the copyright of each package that has a file in the tree.
fn add_package_data(root: &Root, tree: &mut Tree) -> Result<()> {
    let mut add = Vec::new();
    for file in list(&root.packages)? {
        let Some(package) = file.strip_suffix(".list") else { continue };
        let path = root.packages.join(&file);
        let files = fs::read_to_string(&path).at(&path)?;
        let used = files
            .lines()
            .filter(|line| !line.ends_with('/'))
            .any(|line| tree.get(&normalize(line)).is_some_and(|node| !matches!(node.content, Content::Dir)));
        if used {
            add.push(package.to_owned());
        }
    }
    for package in add {
        tree.copy(
            &format!("var/lib/dpkg/status.d/{package}"),
            0o644,
            0,
            root.packages.join(format!("{package}.control")),
        );
        let copyright = format!("usr/share/doc/{package}/copyright");
        let real = fs::canonicalize(root.path.join(&copyright));
        if let Ok(real) = real
            && real.starts_with(&root.path)
        {
            tree.copy(&copyright, 0o644, 0, real);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_followed_inside_the_root() {
        assert_eq!(follow("usr/share/qemu/OVMF.fd", "../ovmf/OVMF.fd"), "usr/share/ovmf/OVMF.fd");
        assert_eq!(follow("usr/lib64/ld.so", "/lib/x86_64-linux-gnu/ld.so"), "usr/lib/x86_64-linux-gnu/ld.so");
        assert_eq!(follow("a", "../../../etc/passwd"), "etc/passwd");
    }

    #[test]
    fn paths_of_unmerged_packages_are_found_in_a_merged_root() {
        assert_eq!(normalize("./lib/x86_64-linux-gnu/libz.so.1"), "usr/lib/x86_64-linux-gnu/libz.so.1");
        assert_eq!(normalize("./lib"), "lib");
    }
}
