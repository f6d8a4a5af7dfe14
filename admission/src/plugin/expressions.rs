//! Expressions of plugins, as far as they can be judged without a machine at hand: they can be read, use what is declared,
//! and give what is asked of them. Where a type is not plain to see, the runtime of plugins has the last word.
//!
//! `vmi` is the machine, with the members its definition has; `domainSpec` is the domain, in the form of Go's `libvirtxml`,
//! and so is what a mutation gives.

use std::{sync::LazyLock, thread};

use cel::{
    common::ast::{CallExpr, ComprehensionExpr, EntryExpr, Expr, IdedEntryExpr, IdedExpr, LiteralValue, operators},
    parser::Parser,
};
use serde_json::{Value, json};

use super::types::{self, Type};

/// Longest expression.
const BYTES_MAX: usize = 4096;
/// Bytes of all expressions of a plugin: reading them takes time.
const ALL_BYTES_MAX: usize = 64 << 10;
/// Deepest nesting of brackets and calls.
const DEPTH_MAX: u16 = 32;
/// Room for parser and checker, which call themselves for each operator of a chain: the longest has half as many as bytes.
const STACK: usize = 64 << 20;
/// Longest complaint.
const MESSAGE_MAX: usize = 1000;

/// The definition of machines, with the members that it leaves to the API server.
static MACHINE: LazyLock<Value> = LazyLock::new(|| {
    let definitions = api::crds::all().unwrap_or_default();
    let definition = definitions.iter().find(|definition| definition.spec.names.plural == "virtualmachineinstances");
    let versions = definition.and_then(|definition| serde_json::to_value(&definition.spec.versions).ok());
    let mut schema =
        versions.and_then(|mut versions| versions.pointer_mut("/0/schema/openAPIV3Schema").map(Value::take));
    let schema = schema.get_or_insert_default();
    if let Some(properties) = schema.pointer_mut("/properties").and_then(Value::as_object_mut) {
        let (text, texts) = (json!({"type": "string"}), json!({"type": "array", "items": {"type": "string"}}));
        let map = json!({"type": "object", "additionalProperties": {"type": "string"}});
        let number = json!({"type": "integer"});
        let metadata = json!({"type": "object", "properties": {
            "name": text, "generateName": text, "namespace": text, "uid": text, "resourceVersion": text, "selfLink": text,
            "creationTimestamp": {}, "deletionTimestamp": {}, "generation": number, "deletionGracePeriodSeconds": number,
            "labels": map, "annotations": map, "finalizers": texts, "ownerReferences": {}, "managedFields": {},
        }});
        properties.insert("metadata".to_owned(), metadata);
        properties.extend(["apiVersion", "kind"].map(|name| (name.to_owned(), text.clone())));
    }
    schema.take()
});

/// What an expression is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Purpose {
    /// It says whether, of a machine.
    OfMachine,
    /// It says whether, of a machine and its domain.
    OfDomain,
    /// It gives members of the domain.
    Mutation,
}

/// What is wrong with each of a plugin's expressions, in their order.
pub(super) fn problems(expressions: &[(Purpose, &str)]) -> Vec<Option<String>> {
    let same =
        |message: &str| -> Vec<Option<String>> { expressions.iter().map(|_| Some(message.to_owned())).collect() };
    if expressions.is_empty() {
        return vec![];
    }
    if expressions.iter().map(|(_, text)| text.len()).sum::<usize>() > ALL_BYTES_MAX {
        return same(&format!("the expressions of a plugin have at most {ALL_BYTES_MAX} bytes together"));
    }
    // On a thread of its own: it has the stack that may be needed, and should the parser panic, nothing else does.
    let found = thread::scope(|scope| {
        let checker = thread::Builder::new().name("expressions".to_owned()).stack_size(STACK);
        let check = || expressions.iter().map(|(purpose, text)| problem(*purpose, text)).collect::<Vec<_>>();
        checker.spawn_scoped(scope, check).ok().and_then(|checker| checker.join().ok())
    });
    found.unwrap_or_else(|| same("the expressions cannot be read"))
}

fn problem(purpose: Purpose, text: &str) -> Option<String> {
    let stage = if purpose == Purpose::Mutation { "compiling expression" } else { "CEL compilation failed" };
    let failed = |error: &str| Some(format!("{stage}: {}", error.chars().take(MESSAGE_MAX).collect::<String>()));
    if text.len() > BYTES_MAX {
        return failed(&format!("an expression has at most {BYTES_MAX} bytes"));
    }
    let parsed = match Parser::new().max_recursion_depth(DEPTH_MAX).parse(text) {
        Ok(parsed) => parsed,
        Err(errors) => return failed(&errors.to_string()),
    };
    let mut checker = Checker { has_domain: purpose != Purpose::OfMachine, bound: vec![] };
    match (checker.expression(&parsed), purpose) {
        (Err(error), _) => failed(&error),
        (Ok(Type::Dyn), _) | (Ok(Type::Libvirt("Domain")), Purpose::Mutation) => None,
        (Ok(other), Purpose::Mutation) => Some(format!("mutation must return Domain, got {other}")),
        (Ok(Type::Plain("bool")), _) => None,
        (Ok(other), _) => Some(format!("CEL expression must return bool, got {other}")),
    }
}

/// What is known on the way through an expression.
struct Checker<'a> {
    has_domain: bool,
    /// Variables that macros bind, the innermost last.
    bound: Vec<(&'a str, Type<'a>)>,
}

impl<'a> Checker<'a> {
    fn expression(&mut self, expression: &'a IdedExpr) -> Result<Type<'a>, String> {
        match &expression.expr {
            Expr::Unspecified => Ok(Type::Dyn),
            Expr::Literal(value) => Ok(Type::Plain(match value {
                LiteralValue::Boolean(_) => "bool",
                LiteralValue::Bytes(_) => "bytes",
                LiteralValue::Double(_) => "double",
                LiteralValue::Int(_) => "int",
                LiteralValue::Null => "null_type",
                LiteralValue::String(_) => "string",
                LiteralValue::UInt(_) => "uint",
            })),
            Expr::Ident(name) => self.name(name),
            Expr::Select(select) => {
                let member = self.expression(&select.operand)?.member(&select.field)?;
                Ok(if select.test { types::BOOL } else { member })
            }
            Expr::Call(call) => self.call(call),
            Expr::Comprehension(comprehension) => self.comprehension(comprehension),
            Expr::List(list) => {
                self.all(&list.elements)?;
                Ok(types::LIST)
            }
            Expr::Map(map) => {
                self.entries(&map.entries, "")?;
                Ok(types::MAP)
            }
            Expr::Struct(object) => {
                let name = object.type_name.trim_start_matches('.');
                let name = name.strip_prefix("libvirtxml.").unwrap_or(name);
                let Some(type_) = types::libvirt(name).filter(|_| self.has_domain) else {
                    return Err(undeclared(&object.type_name));
                };
                self.entries(&object.entries, name)?;
                Ok(type_)
            }
        }
    }

    fn all(&mut self, expressions: &'a [IdedExpr]) -> Result<Vec<Type<'a>>, String> {
        expressions.iter().map(|expression| self.expression(expression)).collect()
    }

    /// Members of a map, or of the object of libvirt's with that name.
    fn entries(&mut self, entries: &'a [IdedEntryExpr], object: &str) -> Result<(), String> {
        for entry in entries {
            match &entry.expr {
                EntryExpr::MapEntry(entry) => {
                    self.expression(&entry.key)?;
                    self.expression(&entry.value)?;
                }
                EntryExpr::StructField(field) => {
                    let value = self.expression(&field.value)?;
                    types::check_member(object, &field.field, value)?;
                }
            }
        }
        Ok(())
    }

    fn name(&self, name: &'a str) -> Result<Type<'a>, String> {
        let bare = name.trim_start_matches('.');
        if let Some((_, type_)) = self.bound.iter().rev().find(|(bound, _)| *bound == bare) {
            return Ok(*type_);
        }
        match bare {
            "vmi" => Ok(types::of(&MACHINE)),
            "domainSpec" if self.has_domain => Ok(Type::Libvirt("Domain")),
            _ if types::NAMES.contains(&bare) => Ok(Type::Plain("type")),
            _ => Err(undeclared(name)),
        }
    }

    fn call(&mut self, call: &'a CallExpr) -> Result<Type<'a>, String> {
        let name = call.func_name.as_str();
        if let Some(target) = &call.target {
            if let Expr::Ident(space) = &target.expr
                && let Some(type_) = types::function_in(space, name)
            {
                self.all(&call.args)?;
                return Ok(type_);
            }
            if let ("sortBy", [variable, key]) = (name, call.args.as_slice())
                && let Expr::Ident(variable) = &variable.expr
            {
                let element = self.expression(target)?.element();
                self.bound.push((variable.as_str(), element));
                self.expression(key)?;
                self.bound.pop();
                return Ok(types::LIST);
            }
        }
        let receiver = call.target.as_ref().map(|target| self.expression(target)).transpose()?;
        let given = self.all(&call.args)?;
        let mismatch = || {
            let all: Vec<String> = receiver.iter().chain(&given).map(ToString::to_string).collect();
            format!("found no matching overload for '{name}' applied to '({})'", all.join(", "))
        };
        let may_be_bool = |types: &[Type<'_>]| types.iter().all(|type_| [Type::Dyn, types::BOOL].contains(type_));
        match (name, given.as_slice()) {
            (operators::CONDITIONAL, [condition, one, other]) if may_be_bool(&[*condition]) => {
                one.or(*other).ok_or_else(mismatch)
            }
            (operators::LOGICAL_AND | operators::LOGICAL_OR | operators::LOGICAL_NOT, operands)
                if may_be_bool(operands) =>
            {
                Ok(types::BOOL)
            }
            (operators::CONDITIONAL | operators::LOGICAL_AND | operators::LOGICAL_OR | operators::LOGICAL_NOT, _) => {
                Err(mismatch())
            }
            (
                operators::EQUALS
                | operators::NOT_EQUALS
                | operators::LESS
                | operators::LESS_EQUALS
                | operators::GREATER
                | operators::GREATER_EQUALS
                | operators::IN
                | operators::NOT_STRICTLY_FALSE,
                _,
            ) => Ok(types::BOOL),
            (operators::NEGATE, [operand]) => Ok(*operand),
            (
                operators::ADD | operators::SUBSTRACT | operators::MULTIPLY | operators::DIVIDE | operators::MODULO,
                [one, other],
            ) => types::computed(*one, *other).ok_or_else(mismatch),
            (operators::INDEX, [container, _]) => Ok(container.element()),
            _ => types::function(name, receiver.is_some()).ok_or_else(|| undeclared(name)),
        }
    }

    /// What the macros `all`, `exists`, `map` and so on are written out to.
    fn comprehension(&mut self, macro_: &'a ComprehensionExpr) -> Result<Type<'a>, String> {
        let range = self.expression(&macro_.iter_range)?;
        let start = self.expression(&macro_.accu_init)?;
        let outer = self.bound.len();
        match &macro_.iter_var2 {
            None => self.bound.push((macro_.iter_var.as_str(), range.step())),
            Some(second) => {
                self.bound.extend([(macro_.iter_var.as_str(), Type::Dyn), (second.as_str(), Type::Dyn)]);
            }
        }
        self.bound.push((macro_.accu_var.as_str(), Type::Dyn));
        self.expression(&macro_.loop_cond)?;
        self.expression(&macro_.loop_step)?;
        let result = self.expression(&macro_.result)?;
        self.bound.truncate(outer);
        let is_sum = matches!(&macro_.result.expr, Expr::Ident(name) if *name == macro_.accu_var);
        Ok(if is_sum { start } else { result })
    }
}

fn undeclared(name: &str) -> String {
    format!("undeclared reference to '{name}'")
}

#[cfg(test)]
mod tests {
    use super::{Purpose::*, *};

    fn check(purpose: Purpose, text: &str) -> String {
        problems(&[(purpose, text)]).remove(0).unwrap_or_default()
    }

    #[test]
    fn sound_expressions_pass() {
        for (purpose, text) in [
            (OfMachine, "true"),
            (OfMachine, "vmi.spec.domain.cpu.cores > 0"),
            (OfMachine, "vmi.metadata.name == 'a' && !has(vmi.spec.hostname)"),
            (OfMachine, "vmi.metadata.labels['gpu'] == 'yes' || 'gpu' in vmi.metadata.labels"),
            (OfMachine, "vmi.spec.volumes.exists(v, v.name.startsWith('root'))"),
            (OfMachine, "vmi.spec.domain.devices.disks.all(d, has(d.disk) && d.disk.bus in ['virtio', 'scsi'])"),
            (OfMachine, "size(vmi.spec.networks.filter(n, has(n.pod))) == 1 && math.greatest(1, 2) == 2"),
            (OfMachine, "vmi.spec.domain.devices.disks.sortBy(d, d.name)[0].name.lowerAscii() == 'a'"),
            (OfMachine, "vmi.spec.domain.devices.autoattachGraphicsDevice"),
            (OfMachine, "vmi.Spec.Domain.CPU.Cores == 2u && vmi.kind == 'VirtualMachineInstance'"),
            (OfDomain, "vmi.Name == \"test\" && domainSpec.Title != ''"),
            (Mutation, "Domain{}"),
            (Mutation, "Domain{Title: \"test\", Memory: DomainMemory{Value: 1u, Unit: 'GiB'}}"),
            (Mutation, "libvirtxml.Domain{Description: vmi.metadata.name + '!'}"),
            (Mutation, "size(domainSpec.Title) > 0 ? Domain{} : Domain{Title: 'x'}"),
        ] {
            assert_eq!(check(purpose, text), "", "{text}");
        }
    }

    #[test]
    fn others_are_told() {
        for (purpose, text, message) in [
            (OfMachine, "vmi.metadata.name", "CEL expression must return bool, got string"),
            (OfMachine, "vmi.Name", "CEL expression must return bool, got string"),
            (OfMachine, "1 + 1", "CEL expression must return bool, got int"),
            (OfMachine, "vmi.spec.volumes", "CEL expression must return bool, got list"),
            (OfMachine, "vmi.spec.domian.cpu.cores > 0", "CEL compilation failed: undefined field 'domian'"),
            (OfMachine, "vm.spec.running", "CEL compilation failed: undeclared reference to 'vm'"),
            (OfMachine, "domainSpec.Title == ''", "CEL compilation failed: undeclared reference to 'domainSpec'"),
            (OfMachine, "vmi.spec.volumes.exists(v, v.nam == 'a')", "CEL compilation failed: undefined field 'nam'"),
            (OfMachine, "frob(vmi)", "CEL compilation failed: undeclared reference to 'frob'"),
            (
                OfMachine,
                "vmi.metadata.name && true",
                "CEL compilation failed: found no matching overload for '_&&_' applied to '(string, bool)'",
            ),
            (Mutation, "vmi.metadata.name", "mutation must return Domain, got string"),
            (Mutation, "DomainMemory{}", "mutation must return Domain, got libvirtxml.DomainMemory"),
            (Mutation, "Domainn{Title: \"test\"}", "compiling expression: undeclared reference to 'Domainn'"),
            (Mutation, "Domain{title: 'x'}", "compiling expression: undefined field 'title'"),
            (
                Mutation,
                "Domain{Memory: \"not-a-struct\"}",
                "compiling expression: field 'Memory' of Domain cannot be a string",
            ),
        ] {
            assert_eq!(check(purpose, text), message, "{text}");
        }
        for text in ["invalid!!! condition", "", "vmi.", "(", "'open", "\u{0}", "a ? b", "vmi.spec.`x`", "for"] {
            assert!(check(OfMachine, text).starts_with("CEL compilation failed: "), "{text}");
            assert!(check(Mutation, text).starts_with("compiling expression: "), "{text}");
        }
    }

    #[test]
    fn large_ones_end_in_a_complaint() {
        let long = |unit: &str| unit.repeat(BYTES_MAX / unit.len());
        for text in [long("("), long("["), long("!"), long("-"), long("{1:"), long("a("), format!("a{}", long(".a"))] {
            let message = check(OfMachine, &text);
            assert!(!message.is_empty() && message.len() < 5 * MESSAGE_MAX, "{message}");
        }
        for text in [format!("1{} == 1", &long("+1")[..4000]), format!("vmi.spec == vmi{}", &long("[0]")[..3900])] {
            assert_eq!(check(OfMachine, &text), "");
        }
        assert!(check(OfMachine, &"a".repeat(BYTES_MAX + 1)).ends_with("an expression has at most 4096 bytes"));
        let text = "a".repeat(BYTES_MAX);
        let all = problems(&[(OfMachine, text.as_str()); 17]);
        assert!(all.iter().all(|one| one.as_ref().unwrap().contains("at most 65536 bytes together")));
    }
}
