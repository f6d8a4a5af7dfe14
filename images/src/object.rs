//! Reads the dynamic linking information of programs and shared libraries.

use elf::{ElfBytes, abi, endian::LittleEndian, gnu_symver, parse::ParseError, string_table::StringTable};

/// Dynamic linking information of an ELF file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Object {
    /// Dynamic loader of a program.
    pub interpreter: Option<String>,
    /// Names of needed libraries.
    pub needed: Vec<String>,
    /// Directories searched first, as written (may begin with `$ORIGIN`).
    pub search: Vec<String>,
    /// Symbol versions it needs: library and version. Weak ones are left out.
    pub needed_versions: Vec<(String, String)>,
    /// Symbol versions it defines.
    pub versions: Vec<String>,
}

/// A symbol that a library defines.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Export {
    /// Name.
    pub name: String,
    /// Its default version, if the library has versions.
    pub version: Option<String>,
    /// It is data.
    pub is_object: bool,
}

/// Returns true if the bytes start with the ELF magic number.
pub(crate) fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

/// Parses an ELF file.
pub(crate) fn parse(bytes: &[u8]) -> Result<Object, ParseError> {
    let file = ElfBytes::<LittleEndian>::minimal_parse(bytes)?;
    let mut object = Object::default();
    if let Some(segments) = file.segments() {
        for segment in segments.iter().filter(|segment| segment.p_type == abi::PT_INTERP) {
            let text = String::from_utf8_lossy(file.segment_data(&segment)?);
            object.interpreter = Some(text.trim_end_matches('\0').to_owned());
        }
    }
    let common = file.find_common_data()?;
    let (Some(dynamic), Some(strings)) = (common.dynamic, common.dynsyms_strs) else { return Ok(object) };
    for entry in dynamic.iter() {
        let text = |offset: u64| -> Result<String, ParseError> { Ok(strings.get(offset.try_into()?)?.to_owned()) };
        match entry.d_tag {
            abi::DT_NEEDED => object.needed.push(text(entry.d_val())?),
            abi::DT_RUNPATH | abi::DT_RPATH => {
                object.search.extend(text(entry.d_val())?.split(':').map(str::to_owned));
            }
            _ => {}
        }
    }
    read_versions(&file, &mut object)?;
    Ok(object)
}

/// Returns the symbols that a library defines, without former versions of them.
pub(crate) fn exports(bytes: &[u8]) -> Result<Vec<Export>, ParseError> {
    let file = ElfBytes::<LittleEndian>::minimal_parse(bytes)?;
    let versions = file.symbol_version_table()?;
    let mut exports = Vec::new();
    let Some((symbols, strings)) = file.dynamic_symbol_table()? else { return Ok(exports) };
    for (index, symbol) in symbols.iter().enumerate() {
        // A symbol with an absolute value is the name of a version.
        if symbol.is_undefined() || symbol.st_shndx == abi::SHN_ABS || symbol.st_bind() == abi::STB_LOCAL {
            continue;
        }
        let mut version = None;
        if let Some(mut definition) = versions.as_ref().map(|table| table.get_definition(index)).transpose()?.flatten()
        {
            if definition.hidden {
                continue;
            }
            if definition.flags & abi::VER_FLG_BASE == 0 {
                version = definition.names.next().transpose()?.map(str::to_owned);
            }
        }
        let name = strings.get(symbol.st_name as usize)?.to_owned();
        exports.push(Export { name, version, is_object: symbol.st_symtype() == abi::STT_OBJECT });
    }
    Ok(exports)
}

fn read_versions(file: &ElfBytes<'_, LittleEndian>, object: &mut Object) -> Result<(), ParseError> {
    let Some(sections) = file.section_headers() else { return Ok(()) };
    for section in sections.iter() {
        if section.sh_type != abi::SHT_GNU_VERNEED && section.sh_type != abi::SHT_GNU_VERDEF {
            continue;
        }
        let (data, _) = file.section_data(&section)?;
        let (strings, _) = file.section_data(&sections.get(section.sh_link as usize)?)?;
        let strings = StringTable::new(strings);
        let (endian, class, count) = (file.ehdr.endianness, file.ehdr.class, u64::from(section.sh_info));
        if section.sh_type == abi::SHT_GNU_VERNEED {
            for (need, aux) in gnu_symver::VerNeedIterator::new(endian, class, count, 0, data) {
                let library = strings.get(need.vn_file as usize)?;
                for version in aux.filter(|version| version.vna_flags & abi::VER_FLG_WEAK == 0) {
                    let name = strings.get(version.vna_name as usize)?;
                    object.needed_versions.push((library.to_owned(), name.to_owned()));
                }
            }
        } else {
            for (_, mut aux) in gnu_symver::VerDefIterator::new(endian, class, count, 0, data) {
                // The first name is the version, the others are its predecessors.
                if let Some(version) = aux.next() {
                    object.versions.push(strings.get(version.vda_name as usize)?.to_owned());
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_needs_the_c_library_in_some_version() {
        let bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let object = parse(&bytes).unwrap();
        assert!(object.needed.iter().any(|name| name == "libc.so.6"), "{object:?}");
        assert!(object.interpreter.as_deref().unwrap().contains("ld-linux"));
        assert!(
            object.needed_versions.iter().any(|(library, version)| library == "libc.so.6" && version == "GLIBC_2.2.5")
        );
    }

    #[test]
    fn damaged_files_are_errors() {
        let bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(parse(&bytes[..40]).is_err());
        assert!(parse(b"\x7fELF").is_err());
        assert!(!is_elf(b"#!/bin/sh"));
    }
}
