//! Lists for the reference documents, read from the sources of the product.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use syn::{
    Attribute, Expr, ExprCall, ExprMethodCall, ExprStruct, ExprTuple, Item, ItemConst, Lit, LitStr, Member,
    punctuated::Punctuated,
    visit::{self, Visit},
};

use crate::{
    Error, read,
    source::{attributes, files, is_test},
};

/// A constant with a name that other tools see.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    /// The name, or its prefix.
    pub name: String,
    /// Documentation of the constant.
    pub purpose: String,
}

/// Returns the string constants of the module `module` of a source file, by name.
///
/// # Errors
/// When the file cannot be read or parsed, or has no such module.
pub fn constants(path: &Path, module: &str) -> Result<Vec<Name>, Error> {
    let file = parse(path)?;
    let items = file.items.into_iter().find_map(|item| match item {
        Item::Mod(found) if found.ident == module => found.content.map(|(_, items)| items),
        _ => None,
    });
    let reason = || format!("there is no module {module}");
    let items = items.ok_or_else(|| Error::List { path: path.to_owned(), reason: reason() })?;
    let mut names: Vec<Name> = items.iter().filter_map(constant).collect();
    names.sort();
    Ok(names)
}

/// Returns the string constants of a crate that begin with `prefix`, by name, each once.
///
/// # Errors
/// When a file cannot be read or parsed.
pub fn constants_with(src: &Path, prefix: &str) -> Result<Vec<Name>, Error> {
    let mut found: BTreeMap<String, Name> = BTreeMap::new();
    for path in files(src)? {
        let file = parse(&path)?;
        let names = file.items.iter().filter_map(constant).filter(|known| known.name.starts_with(prefix));
        found.extend(names.map(|name| (name.name.clone(), name)));
    }
    Ok(found.into_values().collect())
}

fn constant(item: &Item) -> Option<Name> {
    let Item::Const(ItemConst { attrs, expr, .. }) = item else { return None };
    let name = text(expr)?;
    Some(Name { name, purpose: documentation(attrs) })
}

/// Returns the documentation as one line, without links.
fn documentation(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter(|attribute| attribute.path().is_ident("doc")).filter_map(|attribute| {
        let syn::Meta::NameValue(pair) = &attribute.meta else { return None };
        text(&pair.value)
    });
    let lines: Vec<String> = lines.map(|line| line.trim().to_owned()).collect();
    lines.join(" ").replace("[`", "`").replace("`]", "`")
}

/// A metric.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Metric {
    /// Name.
    pub name: String,
    /// Help.
    pub help: String,
}

/// Returns the metrics that a crate defines, by name.
///
/// A metric is a literal name, followed by a literal help: as arguments of a call, in a tuple, or as the fields `gauge` and
/// `help`.
///
/// # Errors
/// When a file cannot be read or parsed, or when a literal looks like a metric but has no help.
pub fn metrics(src: &Path) -> Result<Vec<Metric>, Error> {
    let mut all = BTreeMap::new();
    for path in files(src)? {
        let mut scan = Metrics::default();
        scan.visit_file(&parse(&path)?);
        if let Some(name) = scan.mentioned.iter().find(|name| !scan.found.contains_key(*name)) {
            return Err(Error::List { path, reason: format!("no help stands beside the metric {name}") });
        }
        all.extend(scan.found);
    }
    Ok(all.into_iter().map(|(name, help)| Metric { name, help }).collect())
}

/// Finds metrics in a file.
#[derive(Default)]
struct Metrics {
    found: BTreeMap<String, String>,
    mentioned: BTreeSet<String>,
}

impl Metrics {
    fn pair<'a>(&mut self, mut values: impl Iterator<Item = &'a Expr>) {
        let (Some(name), Some(help)) = (values.next().and_then(text), values.next().and_then(text)) else { return };
        if is_metric(&name) {
            self.found.insert(name, help);
        }
    }
}

impl<'ast> Visit<'ast> for Metrics {
    fn visit_item(&mut self, item: &'ast Item) {
        if !attributes(item).iter().any(is_test) {
            visit::visit_item(self, item);
        }
    }

    fn visit_expr_call(&mut self, call: &'ast ExprCall) {
        self.pair(call.args.iter());
        visit::visit_expr_call(self, call);
    }

    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        self.pair(call.args.iter());
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_tuple(&mut self, tuple: &'ast ExprTuple) {
        self.pair(tuple.elems.iter());
        visit::visit_expr_tuple(self, tuple);
    }

    fn visit_expr_struct(&mut self, value: &'ast ExprStruct) {
        let field = |wanted: &str| {
            let named = |member: &Member| matches!(member, Member::Named(name) if name == wanted);
            value.fields.iter().find(|field| named(&field.member)).map(|field| &field.expr)
        };
        self.pair(["gauge", "help"].into_iter().filter_map(field));
        visit::visit_expr_struct(self, value);
    }

    fn visit_lit_str(&mut self, literal: &'ast LitStr) {
        if is_metric(&literal.value()) {
            self.mentioned.insert(literal.value());
        }
    }
}

fn is_metric(text: &str) -> bool {
    let ours = ["kubevirt_", "ferrovirt_", "process_"].iter().any(|prefix| text.starts_with(prefix));
    ours && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

/// A subresource that virt-api validates and then refuses.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subresource {
    /// Resource and name, as `virtualmachines/migrate`.
    pub name: String,
    /// The missing feature.
    pub feature: String,
}

/// Returns the subresources that answer 501, from `apiserver/src/subresources`.
///
/// # Errors
/// When a file cannot be read or parsed, or when the missing feature is not found.
pub fn refused_subresources(folder: &Path) -> Result<Vec<Subresource>, Error> {
    let mut shared = BTreeMap::new();
    let mut scans = Vec::new();
    for path in files(folder)? {
        let mut scan = Refusals::default();
        scan.visit_file(&parse(&path)?);
        let module = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if path.parent().is_some_and(|parent| parent.ends_with("common")) {
            shared.extend(scan.feature.map(|feature| (module, feature)));
        } else {
            scans.push((path, scan));
        }
    }
    let mut all = Vec::new();
    for (path, scan) in scans {
        let text = read(&path)?;
        let used = || shared.iter().find(|(module, _)| text.contains(&format!("{module}::")));
        let feature = match &scan.feature {
            Some(feature) => feature.clone(),
            None if text.contains("NOT_AVAILABLE") => {
                let reason = || "the missing feature is not found".to_owned();
                let (_, feature) = used().ok_or_else(|| Error::List { path: path.clone(), reason: reason() })?;
                feature.clone()
            }
            None => continue,
        };
        all.extend(scan.names.into_iter().map(|name| Subresource { name, feature: feature.clone() }));
    }
    all.sort();
    Ok(all)
}

/// Finds specifications and refusals in a file.
#[derive(Default)]
struct Refusals {
    names: Vec<String>,
    feature: Option<String>,
}

impl<'ast> Visit<'ast> for Refusals {
    fn visit_item(&mut self, item: &'ast Item) {
        if !attributes(item).iter().any(is_test) {
            visit::visit_item(self, item);
        }
    }

    fn visit_expr_call(&mut self, call: &'ast ExprCall) {
        let function = last_two(&call.func);
        if function == "ApiError::NotAvailable" {
            self.feature = call.args.first().and_then(text);
        } else if function.starts_with("Specification::") {
            self.names.extend(specified(&call.args));
        }
        visit::visit_expr_call(self, call);
    }
}

/// Returns resource and name of the arguments of a specification.
fn specified(arguments: &Punctuated<Expr, syn::Token![,]>) -> Option<String> {
    let mut arguments = arguments.iter();
    let resource = match last_two(arguments.next()?).as_str() {
        "VMS" => "virtualmachines",
        "VMIS" => "virtualmachineinstances",
        _ => return None,
    };
    Some(format!("{resource}/{}", text(arguments.next()?)?))
}

/// Returns the last two parts of a path.
fn last_two(expression: &Expr) -> String {
    let Expr::Path(path) = expression else { return String::new() };
    let parts: Vec<String> = path.path.segments.iter().map(|segment| segment.ident.to_string()).collect();
    parts[parts.len().saturating_sub(2)..].join("::")
}

/// Returns the names of the tests in the files of a folder and below it, with their modules (`nics::plugged`).
///
/// # Errors
/// When a file cannot be read or parsed.
pub fn tests(folder: &Path) -> Result<BTreeSet<String>, Error> {
    let mut names = BTreeSet::new();
    for path in files(folder)? {
        let module = path.strip_prefix(folder).unwrap_or(&path).with_extension("");
        let module = module.to_string_lossy().replace('/', "::");
        let module = module.strip_suffix("::mod").unwrap_or(&module);
        let items = parse(&path)?.items;
        names.extend(items.into_iter().filter_map(|item| match item {
            Item::Fn(function) if function.attrs.iter().any(|attribute| attribute.path().is_ident("test")) => {
                Some(format!("{module}::{}", function.sig.ident))
            }
            _ => None,
        }));
    }
    Ok(names)
}

/// Returns the crates whose sources without tests contain `text`.
///
/// # Errors
/// When a file cannot be read.
pub fn crates_with(root: &Path, crates: &[&str], text: &str, except: &Path) -> Result<Vec<String>, Error> {
    let mut found = Vec::new();
    for name in crates {
        for path in files(&root.join(name).join("src"))? {
            let source = if path == except { String::new() } else { read(&path)? };
            let source = source.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
            let ends = |rest: &str| !rest.starts_with(|c: char| c.is_ascii_alphanumeric());
            if source.split(text).skip(1).any(ends) {
                found.push((*name).to_owned());
                break;
            }
        }
    }
    Ok(found)
}

fn text(expression: &Expr) -> Option<String> {
    match expression {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Str(text) => Some(text.value()),
            _ => None,
        },
        _ => None,
    }
}

fn parse(path: &Path) -> Result<syn::File, Error> {
    syn::parse_file(&read(path)?).map_err(|source| Error::Rust { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> (Vec<(String, String)>, Vec<String>) {
        let mut scan = Metrics::default();
        scan.visit_file(&syn::parse_file(text).unwrap());
        (scan.found.into_iter().collect(), scan.mentioned.into_iter().collect())
    }

    #[test]
    fn metrics_are_found_with_their_help() {
        for text in [
            r#"fn f() { IntGauge::new("kubevirt_x", "Help") }"#,
            r#"fn f() { IntCounterVec::new(Opts::new("kubevirt_x", "Help"), &["a"]) }"#,
            r#"fn f() { self.gauge("kubevirt_x", "Help", labels, 1.0) }"#,
            r#"const ALL: [(&str, &str, u8); 1] = [("kubevirt_x", "Help", 1)];"#,
            r#"static S: Kind = Kind { label: "x", gauge: "kubevirt_x", help: "Help" };"#,
        ] {
            assert_eq!(found(text), (vec![("kubevirt_x".into(), "Help".into())], vec!["kubevirt_x".into()]), "{text}");
        }
    }

    #[test]
    fn a_metric_without_help_is_noticed_and_tests_are_left_out() {
        assert_eq!(found(r#"const X: &str = "kubevirt_x";"#), (vec![], vec!["kubevirt_x".into()]));
        assert_eq!(found(r#"#[cfg(test)] mod tests { const X: &str = "kubevirt_x"; }"#), (vec![], vec![]));
        assert_eq!(found(r#"const X: &str = "kubevirt.io/x";"#), (vec![], vec![]));
    }

    #[test]
    fn refusals_are_found_with_their_specifications() {
        let text = r#"
            static S: Specification = Specification { ..Specification::put(VMS, "migrate", Answer::Empty) };
            fn f() { Err(ApiError::NotAvailable("live migration")) }
            #[cfg(test)] mod tests { static T: Specification = Specification::get(VMIS, "x"); }
        "#;
        let mut scan = Refusals::default();
        scan.visit_file(&syn::parse_file(text).unwrap());
        assert_eq!(scan.names, ["virtualmachines/migrate"]);
        assert_eq!(scan.feature.as_deref(), Some("live migration"));
    }

    #[test]
    fn documentation_is_one_line() {
        let item: Item = syn::parse_str("/// One\n/// of [`Two`].\nconst A: &str = \"a/b\";").unwrap();
        let name = constant(&item).unwrap();
        assert_eq!((name.name.as_str(), name.purpose.as_str()), ("a/b", "One of `Two`."));
    }
}
