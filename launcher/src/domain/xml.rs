//! A minimal writer of XML. Element names are constants; values are untrusted and escaped.

use std::fmt::Write;

/// One element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Element {
    name: &'static str,
    attributes: Vec<(&'static str, String)>,
    children: Vec<Element>,
    text: Option<String>,
}

impl Element {
    /// Creates an empty element.
    pub(crate) const fn new(name: &'static str) -> Self {
        Self { name, attributes: Vec::new(), children: Vec::new(), text: None }
    }

    /// Adds an attribute.
    #[must_use]
    pub(crate) fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.attributes.push((name, value.into()));
        self
    }

    /// Adds an attribute if there is a value for it.
    #[must_use]
    pub(crate) fn with_some(self, name: &'static str, value: Option<impl Into<String>>) -> Self {
        match value {
            Some(value) => self.with(name, value),
            None => self,
        }
    }

    /// Adds a child.
    #[must_use]
    pub(crate) fn child(mut self, child: Element) -> Self {
        self.children.push(child);
        self
    }

    /// Adds children.
    #[must_use]
    pub(crate) fn children(mut self, children: impl IntoIterator<Item = Element>) -> Self {
        self.children.extend(children);
        self
    }

    /// Sets the text. An element has text or children.
    #[must_use]
    pub(crate) fn text(mut self, text: impl Into<String>) -> Self {
        self.text = Some(text.into());
        self
    }

    /// Reports a device that occupies a PCI slot, as the reference counts them.
    pub(crate) fn is_on_pci(&self) -> bool {
        match self.name {
            "filesystem" | "interface" | "watchdog" | "rng" => true,
            "controller" => self.attribute("type") != Some("pci"),
            "memballoon" => self.attribute("model") != Some("none"),
            "hostdev" => self.attribute("type") == Some("pci"),
            "input" => self.attribute("bus") == Some("virtio"),
            "disk" => self.find_child("target").is_some_and(|target| target.attribute("bus") == Some("virtio")),
            _ => false,
        }
    }

    /// Reports a device to which libvirt gives a PCI slot of its own.
    pub(crate) fn takes_pci_slot(&self) -> bool {
        match self.name {
            "controller" => self.is_on_pci() && self.attribute("model") != Some("none"),
            "vsock" => true,
            _ => self.is_on_pci(),
        }
    }

    /// Returns the value of an attribute.
    pub(crate) fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(known, _)| *known == name).map(|(_, value)| value.as_str())
    }

    /// Returns the first child with this name.
    pub(crate) fn find_child(&self, name: &str) -> Option<&Element> {
        self.children.iter().find(|child| child.name == name)
    }

    /// Renders the document.
    pub(crate) fn to_xml(&self) -> String {
        let mut out = String::with_capacity(4096);
        self.write(&mut out, 0);
        out
    }

    /// Reports a character that XML does not allow in any value.
    pub(crate) fn has_forbidden_character(&self) -> bool {
        let forbidden = |text: &str| {
            text.chars()
                .any(|c| (c.is_control() && !matches!(c, '\t' | '\n' | '\r')) || matches!(c, '\u{fffe}' | '\u{ffff}'))
        };
        self.attributes.iter().any(|(_, value)| forbidden(value))
            || self.text.as_deref().is_some_and(forbidden)
            || self.children.iter().any(Self::has_forbidden_character)
    }

    fn write(&self, out: &mut String, depth: usize) {
        let indent = "  ".repeat(depth);
        let _ = write!(out, "{indent}<{}", self.name);
        for (name, value) in &self.attributes {
            let _ = write!(out, " {name}='");
            escape(value, true, out);
            out.push('\'');
        }
        match (&self.text, self.children.is_empty()) {
            (Some(text), _) => {
                out.push('>');
                escape(text, false, out);
                let _ = writeln!(out, "</{}>", self.name);
            }
            (None, true) => out.push_str("/>\n"),
            (None, false) => {
                out.push_str(">\n");
                for child in &self.children {
                    child.write(out, depth + 1);
                }
                let _ = writeln!(out, "{indent}</{}>", self.name);
            }
        }
    }
}

fn escape(value: &str, attribute: bool, out: &mut String) {
    for c in value.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' if attribute => out.push_str("&apos;"),
            '"' if attribute => out.push_str("&quot;"),
            '\n' | '\t' | '\r' if attribute => {
                let _ = write!(out, "&#{};", u32::from(c));
            }
            '\r' => out.push_str("&#13;"),
            c => out.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_cannot_leave_their_place() {
        let element =
            Element::new("a").with("x", "'/><evil y=\"1\">&\n").child(Element::new("b").text("</b><evil/>]]>\u{e9}"));
        assert_eq!(
            element.to_xml(),
            "<a x='&apos;/&gt;&lt;evil y=&quot;1&quot;&gt;&amp;&#10;'>\n  <b>&lt;/b&gt;&lt;evil/&gt;]]&gt;\u{e9}</b>\n</a>\n"
        );
    }

    #[test]
    fn control_characters_are_found() {
        assert!(Element::new("a").child(Element::new("b").text("\u{1}")).has_forbidden_character());
        assert!(!Element::new("a").with("x", "\ttext\n").has_forbidden_character());
    }
}
