//! Code mappings of a process, and unwinding of stacks with the unwind tables of its files.

use std::{
    fs::File,
    io::{self, Read},
    ops::Range,
    path::Path,
};

use elf::{
    ElfStream,
    abi::{PF_X, PT_LOAD},
    endian::LittleEndian,
    note::Note,
};
use framehop::{
    ExplicitModuleSectionInfo, FrameAddress, Module, Unwinder,
    x86_64::{CacheX86_64, UnwindRegsX86_64, UnwinderX86_64},
};

/// Limits the size of a process's maps.
const MAX_MAPS: u64 = 4 << 20;
/// Limits the size of a section. The tables of our largest program have 2 MiB.
const MAX_SECTION: u64 = 64 << 20;
/// Limits the frames of a stack. Nested futures have some hundred.
pub(super) const MAX_FRAMES: usize = 256;

/// An executable mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CodeMapping {
    /// File name.
    pub file: String,
    /// Build ID of the file, hexadecimal.
    pub build_id: String,
    /// Addresses in the process.
    pub loaded: Range<u64>,
    /// Offset in the file.
    pub offset: u64,
    /// Difference between addresses in the process and in the file.
    pub bias: u64,
}

/// Registers and stack of a stopped thread.
#[derive(Clone, Debug)]
pub(super) struct ThreadSnapshot {
    /// Instruction pointer.
    pub instruction: u64,
    /// The end of the stack that things are put on.
    pub stack_pointer: u64,
    /// The frame, in code that keeps one.
    pub frame_pointer: u64,
    /// Copy of the stack, starting at the stack pointer.
    pub stack: Vec<u8>,
}

impl ThreadSnapshot {
    fn word(&self, address: u64) -> Result<u64, ()> {
        let start = usize::try_from(address.checked_sub(self.stack_pointer).ok_or(())?).map_err(|_| ())?;
        let bytes = self.stack.get(start..start.checked_add(8).ok_or(())?).ok_or(())?;
        Ok(u64::from_le_bytes(bytes.try_into().map_err(|_| ())?))
    }
}

/// Executable mappings of a process with unwind tables.
pub(super) struct Program {
    mappings: Vec<CodeMapping>,
    unwinder: UnwinderX86_64<Vec<u8>>,
    cache: CacheX86_64,
}

impl Program {
    /// Reads the mappings that the process has now. Frames in unreadable files have no build ID and cannot be unwound.
    ///
    /// # Errors
    /// Fails if the maps of the process cannot be read.
    pub(super) fn read(process: i32) -> io::Result<Self> {
        let mut maps = String::new();
        File::open(format!("/proc/{process}/maps"))?.take(MAX_MAPS).read_to_string(&mut maps)?;
        let mut program = Self { mappings: Vec::new(), unwinder: UnwinderX86_64::new(), cache: CacheX86_64::new() };
        for (loaded, offset, file) in executable(&maps) {
            // The process may have another root file system.
            let path = format!("/proc/{process}/root{file}");
            let found = Object::read(Path::new(&path), offset).ok().flatten();
            let (build_id, bias) = match found {
                Some(object) => {
                    let bias = loaded.start.wrapping_sub(object.address);
                    let build_id = object.build_id.clone();
                    program.unwinder.add_module(object.module(file.clone(), loaded.clone(), bias));
                    (build_id, bias)
                }
                None => (String::new(), loaded.start.wrapping_sub(offset)),
            };
            program.mappings.push(CodeMapping { file, build_id, loaded, offset, bias });
        }
        Ok(program)
    }

    /// Returns the mappings.
    #[must_use]
    pub(super) fn mappings(&self) -> &[CodeMapping] {
        &self.mappings
    }

    /// Returns the index of the mapping with an address.
    #[must_use]
    pub(super) fn mapping_of(&self, address: u64) -> Option<usize> {
        self.mappings.iter().position(|mapping| mapping.loaded.contains(&address))
    }

    /// Returns the addresses on a stack, innermost first. Addresses of callers lie within the call instruction.
    pub(super) fn frames(&mut self, snapshot: &ThreadSnapshot) -> Vec<u64> {
        let registers = UnwindRegsX86_64::new(snapshot.instruction, snapshot.stack_pointer, snapshot.frame_pointer);
        let mut read = |address| snapshot.word(address);
        let mut frames = self.unwinder.iter_frames(snapshot.instruction, registers, &mut self.cache, &mut read);
        let mut found = Vec::new();
        while let (Ok(Some(frame)), true) = (frames.next(), found.len() < MAX_FRAMES) {
            found.push(FrameAddress::address_for_lookup(frame));
        }
        found
    }
}

/// Parses the executable file mappings of `/proc/<pid>/maps`.
fn executable(maps: &str) -> impl Iterator<Item = (Range<u64>, u64, String)> {
    maps.lines().filter_map(|line| {
        let mut words = line.splitn(6, ' ');
        let (range, rights, offset) = (words.next()?, words.next()?, words.next()?);
        let file = words.nth(2)?.trim_start();
        let (start, end) = range.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        (rights.contains('x') && file.starts_with('/'))
            .then(|| Some((number(start)?..number(end)?, number(offset)?, file.to_owned())))
            .flatten()
    })
}

/// Address range and content of a section.
type Section = Option<(Range<u64>, Vec<u8>)>;

/// Parsed parts of an ELF file.
struct Object {
    /// Address in the file at which the mapped part begins.
    address: u64,
    build_id: String,
    text: Section,
    frames: Section,
    index: Section,
    offsets: Section,
}

impl Object {
    /// Reads the file. `offset` is the file offset of the mapping. Returns `None` if it contains no code.
    fn read(path: &Path, offset: u64) -> Result<Option<Self>, elf::ParseError> {
        let mut file = ElfStream::<LittleEndian, _>::open_stream(File::open(path)?)?;
        // Mappings begin at page boundaries, segments anywhere in a page.
        let within = |start: u64, size: u64| start & !0xfff <= offset && offset < start.saturating_add(size);
        let segment = file
            .segments()
            .iter()
            // A page can contain both the end of data and the beginning of code.
            .filter(|segment| segment.p_type == PT_LOAD && segment.p_flags & PF_X != 0)
            .find(|segment| within(segment.p_offset, segment.p_filesz))
            .map(|segment| (segment.p_vaddr, segment.p_offset));
        let Some((address, start)) = segment else { return Ok(None) };
        Ok(Some(Self {
            address: address.wrapping_add(offset).wrapping_sub(start),
            build_id: build_id(&mut file)?,
            text: section(&mut file, ".text")?,
            frames: section(&mut file, ".eh_frame")?,
            index: section(&mut file, ".eh_frame_hdr")?,
            offsets: section(&mut file, ".got")?,
        }))
    }

    fn module(self, name: String, loaded: Range<u64>, bias: u64) -> Module<Vec<u8>> {
        let split = |section: Section| section.map_or((None, None), |(range, bytes)| (Some(range), Some(bytes)));
        let (text_svma, text) = split(self.text);
        let (eh_frame_svma, eh_frame) = split(self.frames);
        let (eh_frame_hdr_svma, eh_frame_hdr) = split(self.index);
        let sections = ExplicitModuleSectionInfo {
            text_svma,
            text,
            eh_frame_svma,
            eh_frame,
            eh_frame_hdr_svma,
            eh_frame_hdr,
            got_svma: self.offsets.map(|(range, _)| range),
            ..ExplicitModuleSectionInfo::default()
        };
        Module::new(name, loaded, bias, sections)
    }
}

fn section(file: &mut ElfStream<LittleEndian, File>, name: &str) -> Result<Section, elf::ParseError> {
    let Some(header) = file.section_header_by_name(name)?.copied() else { return Ok(None) };
    if header.sh_size > MAX_SECTION {
        return Ok(None);
    }
    let (bytes, _) = file.section_data(&header)?;
    Ok(Some((header.sh_addr..header.sh_addr.wrapping_add(header.sh_size), bytes.to_vec())))
}

fn build_id(file: &mut ElfStream<LittleEndian, File>) -> Result<String, elf::ParseError> {
    let Some(header) = file.section_header_by_name(".note.gnu.build-id")?.copied() else { return Ok(String::new()) };
    let id = file.section_data_as_notes(&header)?.find_map(|note| match note {
        Note::GnuBuildId(id) => Some(id.0.iter().map(|byte| format!("{byte:02x}")).collect()),
        _ => None,
    });
    Ok(id.unwrap_or_default())
}

/// Returns the function at an address of a file with symbols.
#[cfg(test)]
pub(super) fn name_of(file: &str, address: u64) -> String {
    let mut file = ElfStream::<LittleEndian, _>::open_stream(File::open(file).unwrap()).unwrap();
    let (symbols, names) = file.symbol_table().unwrap().unwrap();
    let found = symbols.iter().find(|symbol| (symbol.st_value..symbol.st_value + symbol.st_size).contains(&address));
    found.map_or("", |symbol| names.get(symbol.st_name as usize).unwrap()).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executable_mappings_are_parsed() {
        let maps = "\
55a0-55b0 r--p 00000000 fe:00 12                         /usr/bin/a
55b0-55f0 r-xp 00001000 fe:00 12                         /usr/bin/a
7f00-7f10 rwxp 00000000 00:00 0 
7ff0-7ff8 r-xp 00000000 00:00 0                          [vdso]
7fe0-7fe8 r-xp 00002000 fe:00 13                         /usr/lib/of two words.so";
        let found: Vec<_> = executable(maps).collect();
        assert_eq!(
            found,
            [
                (0x55b0..0x55f0, 0x1000, "/usr/bin/a".to_owned()),
                (0x7fe0..0x7fe8, 0x2000, "/usr/lib/of two words.so".to_owned()),
            ]
        );
        assert_eq!(executable("x\n\n1-2 r-xp").count(), 0);
    }

    #[test]
    fn words_are_read_only_from_the_copy_of_the_stack() {
        let snapshot =
            ThreadSnapshot { instruction: 0, stack_pointer: 0x100, frame_pointer: 0, stack: (0..16).collect() };
        assert_eq!(snapshot.word(0x100), Ok(0x0706_0504_0302_0100));
        assert_eq!(snapshot.word(0x108), Ok(0x0f0e_0d0c_0b0a_0908));
        for outside in [0xff, 0x109, 0x200, u64::MAX] {
            assert_eq!(snapshot.word(outside), Err(()), "{outside:x}");
        }
    }

    #[test]
    fn own_functions_are_found_by_their_symbols() {
        let program = Program::read(i32::try_from(std::process::id()).unwrap()).unwrap();
        let here = own_functions_are_found_by_their_symbols as fn() as usize as u64;
        let mapping = &program.mappings()[program.mapping_of(here).unwrap()];
        assert_eq!(Path::new(&mapping.file), std::env::current_exe().unwrap());
        let name = name_of(&mapping.file, here - mapping.bias);
        assert!(name.contains("own_functions_are_found_by_their_symbols"), "{name}: {mapping:x?}");
    }
}
