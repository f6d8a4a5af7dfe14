//! Types of what expressions of plugins name and give.

use std::fmt;

use serde_json::Value;

/// The type of a value, as far as it can be told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Type<'a> {
    /// Not known before there is a machine.
    Dyn,
    /// One of CEL's own.
    Plain(&'static str),
    /// A list, a map or an object of the definition of machines: its schema.
    Place(&'static Value),
    /// A type of Go's `libvirtxml`: `Domain`, or one of those below it.
    Libvirt(&'a str),
}

/// Yes or no.
pub(super) const BOOL: Type<'static> = Type::Plain("bool");
/// A list.
pub(super) const LIST: Type<'static> = Type::Plain("list");
/// A map.
pub(super) const MAP: Type<'static> = Type::Plain("map");

/// Names of types, which are values themselves.
pub(super) const NAMES: [&str; 10] =
    ["bool", "bytes", "double", "dyn", "int", "list", "map", "null_type", "string", "uint"];

/// Functions and methods, by what they give. Of those for lists and texts alike the type is not known.
const FUNCTIONS: [(&str, &[&str]); 7] = [
    ("bool", &["bool", "matches"]),
    ("bytes", &["bytes"]),
    ("double", &["double"]),
    ("int", &["int", "size"]),
    ("string", &["string"]),
    ("uint", &["uint"]),
    ("dyn", &["duration", "dyn", "timestamp", "type"]),
];
const METHODS: [(&str, &[&str]); 5] = [
    ("bool", &["contains", "endsWith", "matches", "startsWith"]),
    (
        "int",
        &[
            "getDate",
            "getDayOfMonth",
            "getDayOfWeek",
            "getDayOfYear",
            "getFullYear",
            "getHours",
            "getMilliseconds",
            "getMinutes",
            "getMonth",
            "getSeconds",
            "indexOf",
            "lastIndexOf",
            "size",
        ],
    ),
    ("list", &["distinct", "flatten", "slice", "sort", "split"]),
    ("string", &["charAt", "format", "join", "lowerAscii", "replace", "substring", "trim", "upperAscii"]),
    ("dyn", &["first", "last", "reverse"]),
];
const MATH_NUMBERS: [&str; 15] = [
    "abs",
    "bitAnd",
    "bitNot",
    "bitOr",
    "bitShiftLeft",
    "bitShiftRight",
    "bitXor",
    "ceil",
    "floor",
    "greatest",
    "least",
    "round",
    "sign",
    "sqrt",
    "trunc",
];

/// Members of a domain that are texts, and that are numbers; all others are objects or lists of objects.
const DOMAIN_TEXTS: [&str; 10] = [
    "Bootloader",
    "BootloaderArgs",
    "Description",
    "Name",
    "OnCrash",
    "OnPoweroff",
    "OnReboot",
    "Title",
    "Type",
    "UUID",
];
const DOMAIN_NUMBERS: [&str; 3] = ["DefaultIOThread", "ID", "IOThreads"];

impl fmt::Display for Type<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dyn => f.write_str("dyn"),
            Self::Plain(name) => f.write_str(name),
            Self::Place(schema) if schema["type"] == "array" => f.write_str("list"),
            Self::Place(_) => f.write_str("map"),
            Self::Libvirt(name) => write!(f, "libvirtxml.{name}"),
        }
    }
}

fn plain(name: &'static str) -> Type<'static> {
    if name == "dyn" { Type::Dyn } else { Type::Plain(name) }
}

/// The type of what a schema describes.
pub(super) fn of(schema: &'static Value) -> Type<'static> {
    let is = |key: &str| schema[key] == true;
    if is("x-kubernetes-int-or-string") || is("x-kubernetes-preserve-unknown-fields") {
        return Type::Dyn;
    }
    match schema["type"].as_str() {
        Some("boolean") => BOOL,
        Some("integer") => Type::Plain("int"),
        Some("number") => Type::Plain("double"),
        Some("string") => Type::Plain("string"),
        Some("array") => Type::Place(schema),
        Some("object") if schema.get("properties").or(schema.get("additionalProperties")).is_some() => {
            Type::Place(schema)
        }
        _ => Type::Dyn,
    }
}

/// The type of libvirt's with that name, if there can be one: those below `Domain` are many, and known by the form of their
/// names alone.
pub(super) fn libvirt(name: &str) -> Option<Type<'_>> {
    let below = name.strip_prefix("Domain")?;
    let is_name = below.is_empty() || is_go_name(below) && below.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_name.then_some(Type::Libvirt(name))
}

/// Whether a name is one that Go shows.
fn is_go_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_uppercase())
}

/// Whether the object of libvirt's with that name can have this member with such a value.
pub(super) fn check_member(object: &str, member: &str, value: Type<'_>) -> Result<(), String> {
    if !is_go_name(member) {
        return Err(undefined(member));
    }
    let Type::Plain(given) = value else { return Ok(()) };
    let fits = match object {
        "Domain" if DOMAIN_TEXTS.contains(&member) => given == "string",
        "Domain" if DOMAIN_NUMBERS.contains(&member) => ["int", "uint"].contains(&given),
        "Domain" => given == "list",
        _ => true,
    };
    if fits { Ok(()) } else { Err(format!("field '{member}' of Domain cannot be a {given}")) }
}

fn undefined(member: &str) -> String {
    format!("undefined field '{member}'")
}

fn given_by(table: &[(&'static str, &[&str])], name: &str) -> Option<Type<'static>> {
    table.iter().find(|(_, names)| names.contains(&name)).map(|(type_, _)| plain(type_))
}

/// What a function gives, or a method.
pub(super) fn function(name: &str, is_method: bool) -> Option<Type<'static>> {
    // Conversions and `size` are functions; what is said of times and texts are methods.
    if is_method { given_by(&METHODS, name) } else { given_by(&FUNCTIONS, name) }
}

/// What a function of one of the libraries that have a name gives.
pub(super) fn function_in(library: &str, name: &str) -> Option<Type<'static>> {
    match (library, name) {
        ("strings", "quote") => Some(Type::Plain("string")),
        ("lists", "range") => Some(LIST),
        ("math", "isFinite" | "isInf" | "isNaN") => Some(BOOL),
        ("math", number) if MATH_NUMBERS.contains(&number) => Some(Type::Dyn),
        _ => None,
    }
}

/// What two operands of a calculation give; nothing when they do not go together.
pub(super) fn computed<'a>(one: Type<'a>, other: Type<'a>) -> Option<Type<'a>> {
    match (one, other) {
        (Type::Plain("bool" | "null_type" | "map"), _) | (_, Type::Plain("bool" | "null_type" | "map")) => None,
        (Type::Libvirt(_), _) | (_, Type::Libvirt(_)) => None,
        (Type::Plain(one), Type::Plain(other)) => (one == other).then_some(Type::Plain(one)),
        _ => Some(Type::Dyn),
    }
}

impl Type<'_> {
    /// The type of a member.
    pub(super) fn member(self, name: &str) -> Result<Self, String> {
        match self {
            Self::Dyn | Self::Plain("map") => Ok(Self::Dyn),
            Self::Place(schema) if schema["type"] == "object" => match property(schema, name) {
                Some(schema) => Ok(of(schema)),
                // Go's names of members that are not those on the wire.
                None if is_go_name(name) => Ok(Self::Dyn),
                None => Err(undefined(name)),
            },
            Self::Libvirt(_) if is_go_name(name) => Ok(Self::Dyn),
            Self::Libvirt(_) => Err(undefined(name)),
            other => Err(format!("type '{other}' does not support field selection")),
        }
    }

    /// The type of what stands at a place of a list, or below a key of a map.
    pub(super) fn element(self) -> Self {
        let Self::Place(schema) = self else { return Self::Dyn };
        schema.get("items").or_else(|| schema.get("additionalProperties")).map_or(Type::Dyn, of)
    }

    /// The type of what a macro goes through: elements of a list, keys of a map.
    pub(super) fn step(self) -> Self {
        match self {
            Self::Place(schema) if schema["type"] == "array" => self.element(),
            Self::Place(_) => Self::Plain("string"),
            _ => Self::Dyn,
        }
    }

    /// The type of one or the other; nothing when they do not go together.
    pub(super) fn or(self, other: Self) -> Option<Self> {
        match (self, other) {
            (one, other) if one == other => Some(one),
            (Self::Dyn, _) | (_, Self::Dyn) | (Self::Place(_), _) | (_, Self::Place(_)) => Some(Self::Dyn),
            _ => None,
        }
    }
}

/// A member of an object, by its name on the wire or the one Go has for it. Members of metadata can be named without it there.
fn property(schema: &'static Value, name: &str) -> Option<&'static Value> {
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
        return schema.get("additionalProperties");
    };
    if let Some(found) = properties.get(name) {
        return Some(found);
    }
    if !is_go_name(name) {
        return None;
    }
    let alike = properties.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, found)| found);
    alike.or_else(|| property(properties.get("metadata")?, name))
}
