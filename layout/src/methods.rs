//! Calls between the methods of one type whose `impl` blocks lie in several files.
//!
//! They are one object: a circle of calls on `self` shows in no import.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use syn::{
    Expr, ExprMethodCall, ExprPath, ImplItem, ImplItemFn, Item, ItemImpl, Macro, Type,
    visit::{self, Visit},
};

use crate::{
    folders::components,
    source::{Crate, ModulePath, attributes, is_test},
};

/// Files with methods of one type that may lie in a circle of calls.
const MOST: usize = 3;

/// A type and the module that defines it.
type Name = (ModulePath, String);

/// A circle of calls between files.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Circle {
    /// The type.
    pub name: String,
    /// The modules of the files, in alphabetical order.
    pub members: Vec<String>,
    /// An example of each call between them.
    pub examples: Vec<String>,
}

/// Methods of a type, and their calls.
#[derive(Debug, Default)]
struct Methods {
    /// Modules that define a method, by its name. Methods of traits can have the name of another.
    defined: BTreeMap<String, BTreeSet<ModulePath>>,
    /// Module and name of each called method.
    called: BTreeSet<(ModulePath, String)>,
}

/// Returns the circles of calls of more than three files.
#[must_use]
pub fn circles(source: &Crate) -> Vec<Circle> {
    let mut types: BTreeMap<Name, Methods> = BTreeMap::new();
    for (module, file) in source.files() {
        collect(source, module, &file.items, &mut types);
    }
    let mut circles: Vec<Circle> = types.iter().flat_map(|((_, name), methods)| methods.circles(name)).collect();
    circles.sort();
    circles
}

/// Collects the methods of the types that a file implements.
fn collect(source: &Crate, module: &ModulePath, items: &[Item], types: &mut BTreeMap<Name, Methods>) {
    for item in items.iter().filter(|item| !attributes(item).iter().any(is_test)) {
        match item {
            Item::Impl(found) => {
                let Some(name) = name(source, module, found) else { continue };
                let methods = types.entry(name).or_default();
                for method in found.items.iter().filter_map(method) {
                    methods.defined.entry(method.sig.ident.to_string()).or_default().insert(module.clone());
                    let mut calls = Calls(BTreeSet::new());
                    calls.visit_block(&method.block);
                    methods.called.extend(calls.0.into_iter().map(|called| (module.clone(), called)));
                }
            }
            Item::Mod(inner) => {
                let items = inner.content.iter().flat_map(|(_, items)| items);
                collect(source, module, &items.cloned().collect::<Vec<_>>(), types);
            }
            _ => {}
        }
    }
}

fn method(item: &ImplItem) -> Option<&ImplItemFn> {
    match item {
        ImplItem::Fn(method) if !method.attrs.iter().any(is_test) => Some(method),
        _ => None,
    }
}

/// Returns the type that a block implements, if the crate defines it.
fn name(source: &Crate, module: &ModulePath, found: &ItemImpl) -> Option<Name> {
    let Type::Path(path) = &*found.self_ty else { return None };
    let names: Vec<String> = path.path.segments.iter().map(|segment| segment.ident.to_string()).collect();
    source.definition(module, &names)
}

impl Methods {
    fn circles(&self, name: &str) -> Vec<Circle> {
        let mut calls: BTreeMap<String, BTreeMap<String, &str>> = BTreeMap::new();
        for (caller, method) in &self.called {
            let defined = self.defined.get(method).filter(|modules| !modules.contains(caller));
            for module in defined.into_iter().flatten() {
                calls.entry(caller.join("::")).or_default().entry(module.join("::")).or_insert(method);
            }
        }
        let graph = calls.iter().map(|(caller, called)| (caller.clone(), called.keys().cloned().collect())).collect();
        let circle = |members: Vec<String>| {
            let calls = members
                .iter()
                .flat_map(|caller| calls.get(caller).into_iter().flatten().map(move |call| (caller, call)));
            let inner = calls.filter(|(_, (module, _))| members.contains(module));
            let examples = inner.map(|(caller, (module, method))| format!("{caller} -> {module} ({method})")).collect();
            Circle { name: name.to_owned(), examples, members }
        };
        components(&graph).into_iter().filter(|members| members.len() > MOST).map(circle).collect()
    }
}

/// Names of the methods that a method calls on `self`, also in macros.
struct Calls(BTreeSet<String>);

impl Calls {
    fn tokens(&mut self, tokens: TokenStream) {
        let mut before = ["", ""].map(str::to_owned);
        for token in tokens {
            if let TokenTree::Group(group) = &token {
                self.tokens(group.stream());
            }
            let text = token.to_string();
            if matches!(token, TokenTree::Ident(_)) && before == ["self", "."] {
                self.0.insert(text.clone());
            }
            let [_, last] = before;
            before = [last, text];
        }
    }
}

impl<'ast> Visit<'ast> for Calls {
    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        if matches!(&*call.receiver, Expr::Path(path) if path.path.is_ident("self")) {
            self.0.insert(call.method.to_string());
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_path(&mut self, path: &'ast ExprPath) {
        let mut names = path.path.segments.iter();
        if let (Some(first), Some(method), None) = (names.next(), names.next(), names.next())
            && first.ident == "Self"
        {
            self.0.insert(method.ident.to_string());
        }
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        self.tokens(call.tokens.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<(String, Vec<String>)> {
        circles(&Crate::parse(files)).into_iter().map(|circle| (circle.name, circle.members)).collect()
    }

    #[test]
    fn circles_of_four_files_are_found() {
        let circle = [
            ("", ""),
            ("engine", "pub struct Engine;"),
            ("engine/a", "use super::Engine; impl Engine { fn a(&mut self) { self.b(1) } }"),
            ("engine/b", "use crate::engine::Engine; impl Engine { fn b(&mut self, n: u8) { assert!(self.c()) } }"),
            ("engine/c", "use super::*; impl Engine { fn c(&self) -> bool { Self::d(self) } }"),
            ("engine/d", "impl super::Engine { fn d(&self) { let f = || self.a(); f() } }"),
        ];
        let members = ["engine::a", "engine::b", "engine::c", "engine::d"].map(str::to_owned).to_vec();
        assert_eq!(found(&circle), [("Engine".to_owned(), members)]);
        for (file, text) in [
            // Three files call each other.
            (5, "impl super::Engine { fn d(&self) { self.b() } }"),
            (4, "use super::*; impl Engine { fn c(&self) -> bool { self.other.d() } }"),
            // Another type has the same name.
            (3, "struct Engine; impl Engine { fn b(&self) { self.c() } }"),
            (2, "use super::Engine; #[cfg(test)] impl Engine { fn a(&self) { self.b() } }"),
            // The file has a method of this name.
            (2, "use super::Engine; impl Engine { fn a(&self) { self.b() } fn b(&self) {} }"),
        ] {
            let mut files = circle;
            files[file].1 = text;
            assert_eq!(found(&files), [], "{text}");
        }
    }
}
