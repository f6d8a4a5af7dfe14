//! The modules of a crate and what each of them imports, without the code of tests.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use proc_macro2::{TokenStream, TokenTree};
use syn::{
    Attribute, File, Item, ItemMod, ItemUse, Macro, Path as RustPath, UseTree,
    visit::{self, Visit},
};

use crate::{Error, read};

/// The path of a module in its crate; the root's is empty.
pub type ModulePath = Vec<String>;

/// A module of a crate: one file.
#[derive(Debug, Default)]
pub struct Module {
    /// Paths that the module names, absolute, as far as they can lie in the crate.
    paths: BTreeSet<Vec<String>>,
    /// Names that the module imports or exports under another path.
    aliases: BTreeMap<String, Vec<String>>,
    /// Paths of which the module imports everything.
    globs: Vec<Vec<String>>,
    /// Types that the module defines.
    types: BTreeSet<String>,
}

/// The modules of a crate.
pub struct Crate {
    modules: BTreeMap<ModulePath, Module>,
    files: Vec<(ModulePath, File)>,
}

impl Crate {
    /// Reads the modules below `src`, a folder with `lib.rs`, `main.rs` or both.
    ///
    /// # Errors
    /// When a file cannot be read or parsed.
    pub fn read(src: &Path) -> Result<Self, Error> {
        let mut files = Vec::new();
        collect(src, &mut Vec::new(), &mut files)?;
        let parse = |(module, path): (ModulePath, PathBuf)| {
            let file = syn::parse_file(&read(&path)?).map_err(|source| Error::Rust { path, source })?;
            Ok((module, file))
        };
        Ok(Self::scan(files.into_iter().map(parse).collect::<Result<_, Error>>()?))
    }

    fn scan(files: Vec<(ModulePath, File)>) -> Self {
        let known: BTreeSet<ModulePath> = files.iter().map(|(module, _)| module.clone()).collect();
        let mut modules: BTreeMap<ModulePath, Module> = BTreeMap::new();
        for (module, file) in &files {
            let found = modules.entry(module.clone()).or_default();
            let mut scan = Scan { known: &known, module: module.clone(), depth: 0, found };
            scan.visit_file(file);
        }
        Self { modules, files }
    }

    /// Returns the paths of all modules.
    pub fn modules(&self) -> impl Iterator<Item = &ModulePath> {
        self.modules.keys()
    }

    /// Returns the files with their modules.
    pub(crate) fn files(&self) -> &[(ModulePath, File)] {
        &self.files
    }

    /// Returns the imports between modules: user and used. Names that a module exports for another count for the other.
    #[must_use]
    pub fn imports(&self) -> BTreeSet<(ModulePath, ModulePath)> {
        let mut imports = BTreeSet::new();
        for (user, module) in &self.modules {
            for path in &module.paths {
                let used = self.resolve(path, 0);
                if used != *user {
                    imports.insert((user.clone(), used));
                }
            }
        }
        imports
    }

    /// Returns the module in which the item at `path` is defined.
    fn resolve(&self, path: &[String], depth: usize) -> ModulePath {
        const MOST: usize = 16;
        let length =
            (0..=path.len()).rev().find(|length| self.modules.contains_key(&path[..*length])).unwrap_or_default();
        let (module, rest) = path.split_at(length);
        let Some((name, rest)) = rest.split_first().filter(|_| depth < MOST) else { return module.to_vec() };
        let Some(definition) = self.modules.get(module) else { return module.to_vec() };
        if let Some(target) = definition.aliases.get(name) {
            return self.resolve(&[target, rest].concat(), depth + 1);
        }
        module.to_vec()
    }

    /// Returns the module that defines a type, and its name there, as `path` names it in `module`.
    pub(crate) fn definition(&self, module: &ModulePath, path: &[String]) -> Option<(ModulePath, String)> {
        if let [name] = path {
            return self.defined(module, name, 0);
        }
        let absolute = absolute(&|path| self.modules.contains_key(path), module, 0, path)?;
        let (name, parents) = absolute.split_last()?;
        self.defined(&self.resolve(parents, 0), name, 0)
    }

    fn defined(&self, module: &[String], name: &str, depth: usize) -> Option<(ModulePath, String)> {
        const MOST: usize = 4;
        let found = self.modules.get(module).filter(|_| depth < MOST)?;
        if found.types.contains(name) {
            return Some((module.to_vec(), name.to_owned()));
        }
        if let Some((name, parents)) = found.aliases.get(name).and_then(|target| target.split_last()) {
            return self.defined(&self.resolve(parents, 0), name, depth + 1);
        }
        found.globs.iter().find_map(|glob| self.defined(glob, name, depth + 1))
    }

    #[cfg(test)]
    pub(crate) fn parse(files: &[(&str, &str)]) -> Self {
        let path = |name: &str| name.split('/').filter(|part| !part.is_empty()).map(str::to_owned).collect();
        Self::scan(files.iter().map(|(name, text)| (path(name), syn::parse_file(text).unwrap())).collect())
    }
}

/// Returns the source files of a crate without its tests and programs, sorted by path.
pub(crate) fn files(src: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    collect(src, &mut Vec::new(), &mut files)?;
    let mut paths: Vec<PathBuf> = files.into_iter().map(|(_, path)| path).collect();
    paths.sort();
    Ok(paths)
}

/// Collects the source files below a folder with the paths of their modules. Programs in `bin` are left out: they are crates
/// of their own.
fn collect(folder: &Path, module: &mut ModulePath, files: &mut Vec<(ModulePath, PathBuf)>) -> Result<(), Error> {
    let failed = |source| Error::File { path: folder.to_owned(), source };
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        if path.is_dir() {
            let tests = name == "tests" || module.is_empty() && name == "bin";
            if !tests {
                module.push(name);
                collect(&path, module, files)?;
                module.pop();
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") && name != "tests" {
            let root = matches!(name.as_str(), "lib" | "main" | "mod");
            let own = if root { Vec::new() } else { vec![name] };
            files.push(([module.clone(), own].concat(), path));
        }
    }
    Ok(())
}

/// Returns the absolute form of a path that a module names, or none when it leads out of the crate. `depth`: modules written out in
/// the file around the present place.
fn absolute(
    is_known: &dyn Fn(&[String]) -> bool,
    module: &[String],
    depth: usize,
    path: &[String],
) -> Option<Vec<String>> {
    let (first, rest) = path.split_first()?;
    match first.as_str() {
        "crate" => Some(rest.to_vec()),
        "self" if depth == 0 => Some([module, rest].concat()),
        // Paths in a module that is written out in the file: those that lead out of it count for the file.
        "super" => {
            let ups = path.iter().take_while(|part| *part == "super").count();
            let base = module.get(..module.len().checked_sub(ups.checked_sub(depth)?)?)?;
            Some([base, &path[ups..]].concat())
        }
        _ => {
            let child = [module, std::slice::from_ref(first)].concat();
            (is_known(&child) && path.len() > 1).then(|| [module, path].concat())
        }
    }
}

/// Finds the paths in one file.
struct Scan<'a> {
    known: &'a BTreeSet<ModulePath>,
    /// The module of the file.
    module: ModulePath,
    /// Modules written out in the file around the present place.
    depth: usize,
    found: &'a mut Module,
}

impl Scan<'_> {
    fn absolute(&self, path: &[String]) -> Option<Vec<String>> {
        absolute(&|module| self.known.contains(module), &self.module, self.depth, path)
    }

    fn record(&mut self, path: &[String]) {
        if let Some(path) = self.absolute(path) {
            self.found.paths.insert(path);
        }
    }

    fn tree(&mut self, prefix: &mut Vec<String>, tree: &UseTree) {
        match tree {
            UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                self.tree(prefix, &path.tree);
                prefix.pop();
            }
            UseTree::Group(group) => group.items.iter().for_each(|item| self.tree(prefix, item)),
            UseTree::Name(name) => self.import(prefix, &name.ident.to_string(), None),
            UseTree::Rename(rename) => self.import(prefix, &rename.ident.to_string(), Some(rename.rename.to_string())),
            UseTree::Glob(_) => {
                self.record(prefix);
                if let Some(path) = self.absolute(prefix) {
                    self.found.globs.push(path);
                }
            }
        }
    }

    fn import(&mut self, prefix: &[String], name: &str, rename: Option<String>) {
        let path = if name == "self" { prefix.to_vec() } else { [prefix, &[name.to_owned()]].concat() };
        self.record(&path);
        let alias = rename.or_else(|| path.last().cloned());
        if let (Some(alias), Some(path), 0) = (alias, self.absolute(&path), self.depth) {
            self.found.aliases.insert(alias, path);
        }
    }

    /// Finds paths in the tokens of a macro, which are not parsed.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) if colons == 2 => path.push(ident.to_string()),
                TokenTree::Punct(punct) if punct.as_char() == ':' && !path.is_empty() && colons < 2 => {
                    colons += 1;
                    continue;
                }
                other => {
                    self.record_token_path(&path);
                    path = match other {
                        TokenTree::Ident(ident) => vec![ident.to_string()],
                        TokenTree::Group(group) => {
                            self.tokens(group.stream());
                            Vec::new()
                        }
                        _ => Vec::new(),
                    };
                }
            }
            colons = 0;
        }
        self.record_token_path(&path);
    }

    fn record_token_path(&mut self, path: &[String]) {
        if path.len() > 1 && matches!(path[0].as_str(), "crate" | "super" | "self") {
            self.record(path);
        }
    }
}

impl<'ast> Visit<'ast> for Scan<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if !attributes(item).iter().any(is_test) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        self.depth += usize::from(module.content.is_some());
        visit::visit_item_mod(self, module);
        self.depth -= usize::from(module.content.is_some());
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        self.tree(&mut Vec::new(), &item.tree);
    }

    fn visit_path(&mut self, path: &'ast RustPath) {
        let names: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if path.leading_colon.is_none() && names.len() > 1 {
            self.record(&names);
        }
        visit::visit_path(self, path);
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.found.types.insert(item.ident.to_string());
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.found.types.insert(item.ident.to_string());
        visit::visit_item_enum(self, item);
    }

    // Visibility such as `pub(in crate::a)` is no import.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_macro(&mut self, call: &'ast Macro) {
        self.tokens(call.tokens.clone());
    }
}

pub(crate) fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Returns true for `#[cfg(test)]` and `#[cfg(any(test, ..))]`.
pub(crate) fn is_test(attribute: &Attribute) -> bool {
    let syn::Meta::List(list) = &attribute.meta else { return false };
    attribute.path().is_ident("cfg") && contains_test(list.tokens.clone())
}

fn contains_test(tokens: TokenStream) -> bool {
    let mut negated = false;
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(ident) if ident == "not" => {
            negated = true;
            false
        }
        TokenTree::Ident(ident) => ident == "test",
        TokenTree::Group(group) => !std::mem::take(&mut negated) && contains_test(group.stream()),
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn imports(files: &[(&str, &str)]) -> Vec<(String, String)> {
        let found = Crate::parse(files).imports();
        found.into_iter().map(|(user, used)| (user.join("/"), used.join("/"))).collect()
    }

    #[test]
    fn imports_are_found_in_uses_paths_and_macros() {
        for text in [
            "use crate::b::Item;",
            "use crate::{b::{Item, Other}};",
            "use super::b;",
            "use super::b::*;",
            "fn f() { crate::b::call() }",
            "struct S(super::b::Item);",
            "fn f() { println!(\"{}\", crate::b::CONST) }",
            "impl crate::b::Trait for S {}",
            "mod inner { use super::super::b::Item; }",
        ] {
            assert_eq!(imports(&[("", ""), ("a", text), ("b", "")])[..], [("a".into(), "b".into())], "{text}");
        }
    }

    #[test]
    fn tests_and_foreign_names_are_left_out() {
        for text in [
            "#[cfg(test)] mod tests { use crate::b::Item; }",
            "#[cfg(test)] use crate::b::Item;",
            "use serde::b::Item;",
            "pub(in crate::b) struct S;",
            "mod inner { use super::b::Item; }",
        ] {
            let found = imports(&[("", ""), ("a", text), ("b", "")]);
            assert!(found.iter().all(|(_, used)| used != "b"), "{text}: {found:?}");
        }
    }

    #[test]
    fn names_exported_for_another_module_count_for_that_one() {
        let files = [
            ("", "pub use self::a::Item; mod a; mod b;"),
            ("a", "pub(crate) use inner::Item;"),
            ("a/inner", "pub(crate) struct Item;"),
            ("b", "use crate::{Item, a::Item as Second};"),
        ];
        let found = imports(&files);
        assert!(found.contains(&("b".into(), "a/inner".into())), "{found:?}");
        assert!(!found.contains(&("b".into(), "a".into())), "{found:?}");
    }
}
