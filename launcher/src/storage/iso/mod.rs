//! Writes small ISO 9660 images with Joliet names, for cloud-init data and configuration files.
//!
//! ```text
//! sector 16 primary descriptor | 17 Joliet descriptor | 18 terminator
//!        19 path tables (primary LE, BE, Joliet LE, BE) | directories (primary, Joliet) | files
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use thiserror::Error;

const SECTOR: usize = 2048;
/// Largest block size of storage: images are multiples of it.
const BLOCK: usize = 4096;
/// Longest Joliet name, as in other ISO writers.
const NAME_LIMIT: usize = 103;
/// Longest extension that a shortened name keeps.
const EXTENSION_LIMIT: usize = 16;
/// Longest label. Joliet's descriptor holds its first half.
const LABEL_LIMIT: usize = 32;
/// Deepest directory.
const DEPTH_LIMIT: usize = 7;
/// Largest image.
const IMAGE_LIMIT: usize = 64 * 1024 * 1024;
/// 2020-01-01 00:00:00 UTC in a directory record; equal content gives equal images.
const RECORD_TIME: [u8; 7] = [120, 1, 1, 0, 0, 0, 0];
const VOLUME_TIME: &[u8; 17] = b"2020010100000000\0";
/// Empty sectors at the end, as in other ISO writers: kernels read ahead past the last file, and busybox's `findfs`
/// takes a disk of less than 64 KiB for broken.
const PADDING: usize = 150;

/// Failure to write an image.
#[derive(Debug, Error)]
pub(crate) enum IsoError {
    /// A name does not fit into the format.
    #[error("the name {0:?} does not fit into an ISO 9660 image")]
    Name(String),
    /// The content is too large.
    #[error("the files are too large for an image of configuration data")]
    TooLarge,
    /// Writing failed.
    #[error("cannot write the image: {0}")]
    Io(#[from] std::io::Error),
}

/// Files of an image by path; components are separated by `/`.
pub(crate) type Files = BTreeMap<String, Vec<u8>>;

/// Writes an image to `path`, replaces an existing one, and returns its size.
pub(crate) fn write(path: &Path, label: &str, files: &Files) -> Result<u64, IsoError> {
    let image = build(label, files)?;
    let staging = path.with_extension("staging");
    let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o640).open(&staging)?;
    file.write_all(&image)?;
    drop(file);
    std::fs::rename(&staging, path)?;
    Ok(image.len() as u64)
}

/// Writes an image into the file at `path`, which QEMU may have opened, and returns its size.
pub(crate) fn overwrite(path: &Path, label: &str, files: &Files) -> Result<u64, IsoError> {
    let image = build(label, files)?;
    let mut file = std::fs::OpenOptions::new().write(true).open(path)?;
    file.write_all(&image)?;
    Ok(image.len() as u64)
}

#[derive(Default)]
struct Directory {
    parent: usize,
    directories: BTreeMap<String, usize>,
    files: Vec<(String, usize)>,
}

/// The two trees of names: plain ISO 9660 and Joliet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Primary,
    Joliet,
}

/// Layout of the image in one of the two forms.
struct Plan {
    form: Form,
    /// Directories in the order of the path table; the value is the index into the tree.
    order: Vec<usize>,
    /// Names of directories and files in this form.
    directory_names: Vec<Vec<u8>>,
    file_names: Vec<Vec<u8>>,
    /// Sector and length of each directory.
    extents: Vec<(usize, usize)>,
    table_at: usize,
    table_size: usize,
}

/// Returns the bytes of an image.
pub(crate) fn build(label: &str, files: &Files) -> Result<Vec<u8>, IsoError> {
    if label.is_empty() || label.len() > LABEL_LIMIT || !label.is_ascii() {
        return Err(IsoError::Name(label.to_owned()));
    }
    if files.values().map(Vec::len).fold(0, usize::saturating_add) > IMAGE_LIMIT {
        return Err(IsoError::TooLarge);
    }
    let contents: Vec<&[u8]> = files.values().map(Vec::as_slice).collect();
    let tree = tree(files)?;

    let mut plans = [plan(Form::Primary, &tree, contents.len())?, plan(Form::Joliet, &tree, contents.len())?];
    let mut at = 19;
    for plan in &mut plans {
        plan.table_at = at;
        at += 2 * plan.table_size.div_ceil(SECTOR);
    }
    for plan in &mut plans {
        for index in plan.order.clone() {
            let length = records(plan, &tree, index, &contents, &[]).len();
            if let Some(extent) = plan.extents.get_mut(index) {
                *extent = (at, length);
            }
            at += length / SECTOR;
        }
    }
    let file_sectors: Vec<usize> = contents
        .iter()
        .map(|content| {
            let here = at;
            at += content.len().div_ceil(SECTOR);
            here
        })
        .collect();

    // Direct I/O on storage with blocks of 4 KiB reads whole blocks.
    at = (at + PADDING).next_multiple_of(BLOCK / SECTOR);
    let mut image = Image { bytes: vec![0; at * SECTOR] };
    for (sector, plan) in [16, 17].into_iter().zip(&plans) {
        image.put(sector, &descriptor(plan, label, at));
    }
    let mut terminator = vec![255];
    terminator.extend(b"CD001\x01");
    image.put(18, &terminator);
    for plan in &plans {
        image.put(plan.table_at, &path_table(plan, &tree, false));
        image.put(plan.table_at + plan.table_size.div_ceil(SECTOR), &path_table(plan, &tree, true));
        for index in &plan.order {
            if let Some((sector, _)) = plan.extents.get(*index) {
                image.put(*sector, &records(plan, &tree, *index, &contents, &file_sectors));
            }
        }
    }
    for (sector, content) in file_sectors.iter().zip(&contents) {
        image.put(*sector, content);
    }
    Ok(image.bytes)
}

struct Image {
    bytes: Vec<u8>,
}

impl Image {
    fn put(&mut self, sector: usize, data: &[u8]) {
        if let Some(slot) = self.bytes.get_mut(sector * SECTOR..sector * SECTOR + data.len()) {
            slot.copy_from_slice(data);
        }
    }
}

fn tree(files: &Files) -> Result<Vec<Directory>, IsoError> {
    let mut tree = vec![Directory::default()];
    for (number, path) in files.keys().enumerate() {
        let mut components: Vec<&str> = path.split('/').collect();
        let invalid = || IsoError::Name(path.clone());
        if components.iter().any(|name| name.is_empty() || *name == "." || *name == "..") {
            return Err(invalid());
        }
        let name = components.pop().ok_or_else(invalid)?;
        let mut current = 0;
        for (depth, component) in components.into_iter().enumerate() {
            if depth + 1 >= DEPTH_LIMIT {
                return Err(invalid());
            }
            let next = tree.len();
            let directory = tree.get_mut(current).ok_or_else(invalid)?;
            let child = *directory.directories.entry(component.to_owned()).or_insert(next);
            if child == next {
                tree.push(Directory { parent: current, ..Directory::default() });
            }
            current = child;
        }
        tree.get_mut(current).ok_or_else(invalid)?.files.push((name.to_owned(), number));
    }
    Ok(tree)
}

fn plan(form: Form, tree: &[Directory], file_count: usize) -> Result<Plan, IsoError> {
    let mut directory_names = vec![Vec::new(); tree.len()];
    let mut file_names = vec![Vec::new(); file_count];
    if let Some(root) = directory_names.first_mut() {
        *root = vec![0];
    }
    for directory in tree {
        let shortened = shortened_names(directory);
        let joliet = |name: &str| ucs2(shortened.get(name).map_or(name, String::as_str));
        for (name, child) in &directory.directories {
            if let Some(slot) = directory_names.get_mut(*child) {
                *slot = match form {
                    Form::Joliet => joliet(name),
                    // Plain names only distinguish the entries; guests use the Joliet names.
                    Form::Primary => format!("D{child:07}").into_bytes(),
                };
            }
        }
        for (name, number) in &directory.files {
            if let Some(slot) = file_names.get_mut(*number) {
                *slot = match form {
                    Form::Joliet => joliet(name),
                    Form::Primary => plain_name(name, *number),
                };
            }
        }
    }
    // Path tables are sorted by depth, then by parent, then by name; parents come before children.
    let mut order: Vec<usize> = vec![0];
    let mut level = vec![0];
    while !level.is_empty() {
        let mut next = Vec::new();
        for parent in &level {
            let mut children: Vec<usize> =
                tree.get(*parent).map(|d| d.directories.values().copied().collect()).unwrap_or_default();
            children.sort_by(|a, b| directory_names.get(*a).cmp(&directory_names.get(*b)));
            next.extend(children);
        }
        order.extend(&next);
        level = next;
    }
    if order.len() > usize::from(u16::MAX) {
        return Err(IsoError::TooLarge);
    }
    let mut plan = Plan {
        form,
        order,
        directory_names,
        file_names,
        extents: vec![(0, 0); tree.len()],
        table_at: 0,
        table_size: 0,
    };
    plan.table_size = path_table(&plan, tree, false).len();
    Ok(plan)
}

/// Returns a name that fits for each of a directory's entries that is too long, unlike those of the others.
fn shortened_names(directory: &Directory) -> BTreeMap<&str, String> {
    let files = directory.files.iter().map(|(name, _)| name.as_str());
    let names = directory.directories.keys().map(String::as_str).chain(files);
    let (fitting, long): (Vec<&str>, Vec<&str>) = names.partition(|name| width(name) <= NAME_LIMIT);
    let mut taken: BTreeSet<String> = fitting.into_iter().map(str::to_owned).collect();
    let mut names = BTreeMap::new();
    for name in long {
        let mut numbered = (1..=taken.len() + 1).map(|number| shortened(name, number));
        if let Some(free) = numbered.find(|short| !taken.contains(short)) {
            taken.insert(free.clone());
            names.insert(name, free);
        }
    }
    names
}

/// Shortens a name to its beginning, a number and its extension.
fn shortened(name: &str, number: usize) -> String {
    let end = match name.rsplit_once('.') {
        Some((_, extension)) if width(extension) <= EXTENSION_LIMIT => format!("~{number}.{extension}"),
        _ => format!("~{number}"),
    };
    let mut left = NAME_LIMIT.saturating_sub(width(&end));
    let fits = |letter: &char| {
        let rest = left.checked_sub(letter.len_utf16());
        left = rest.unwrap_or_default();
        rest.is_some()
    };
    name.chars().take_while(fits).chain(end.chars()).collect()
}

/// Returns the length of a Joliet name.
fn width(name: &str) -> usize {
    name.encode_utf16().count()
}

fn ucs2(name: &str) -> Vec<u8> {
    name.encode_utf16().flat_map(u16::to_be_bytes).collect()
}

/// Returns an 8.3 name, unique by its number, that resembles the real one.
fn plain_name(name: &str, number: usize) -> Vec<u8> {
    let hint: String = name.chars().filter(char::is_ascii_alphanumeric).take(5).collect();
    format!("{}{number:03X}.;1", hint.to_ascii_uppercase()).into_bytes()
}

fn both32(value: usize) -> [u8; 8] {
    let value = u32::try_from(value).unwrap_or(u32::MAX);
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&value.to_le_bytes());
    bytes[4..].copy_from_slice(&value.to_be_bytes());
    bytes
}

fn both16(value: u16) -> [u8; 4] {
    let ([a, b], [c, d]) = (value.to_le_bytes(), value.to_be_bytes());
    [a, b, c, d]
}

fn record(name: &[u8], sector: usize, length: usize, directory: bool) -> Vec<u8> {
    let size = (33 + name.len()).next_multiple_of(2);
    let mut record = vec![u8::try_from(size).unwrap_or(u8::MAX), 0];
    record.extend(both32(sector));
    record.extend(both32(length));
    record.extend(RECORD_TIME);
    record.extend([if directory { 2 } else { 0 }, 0, 0]);
    record.extend(both16(1));
    record.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
    record.extend(name);
    record.resize(size, 0);
    record
}

/// Returns a directory's records, padded to whole sectors. Without `file_sectors` only the length is right.
fn records(plan: &Plan, tree: &[Directory], index: usize, contents: &[&[u8]], file_sectors: &[usize]) -> Vec<u8> {
    let Some(directory) = tree.get(index) else { return Vec::new() };
    let extent = |index: usize| plan.extents.get(index).copied().unwrap_or_default();
    let mut entries: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
    for child in directory.directories.values() {
        let name = plan.directory_names.get(*child).cloned().unwrap_or_default();
        let (sector, length) = extent(*child);
        entries.push((name.clone(), record(&name, sector, length, true)));
    }
    for (_, number) in &directory.files {
        let name = plan.file_names.get(*number).cloned().unwrap_or_default();
        let sector = file_sectors.get(*number).copied().unwrap_or_default();
        let length = contents.get(*number).map_or(0, |content| content.len());
        entries.push((name.clone(), record(&name, sector, length, false)));
    }
    entries.sort();
    let (own, parent) = (extent(index), extent(directory.parent));
    let mut bytes = record(&[0], own.0, own.1, true);
    bytes.extend(record(&[1], parent.0, parent.1, true));
    for (_, record) in entries {
        // A record does not cross a sector's boundary.
        if bytes.len() % SECTOR + record.len() > SECTOR {
            bytes.resize(bytes.len().next_multiple_of(SECTOR), 0);
        }
        bytes.extend(record);
    }
    bytes.resize(bytes.len().next_multiple_of(SECTOR), 0);
    bytes
}

fn path_table(plan: &Plan, tree: &[Directory], big_endian: bool) -> Vec<u8> {
    let mut bytes = Vec::new();
    for index in &plan.order {
        let name = plan.directory_names.get(*index).cloned().unwrap_or_default();
        let (sector, _) = plan.extents.get(*index).copied().unwrap_or_default();
        let parent = tree.get(*index).map_or(0, |directory| directory.parent);
        let number = plan.order.iter().position(|i| *i == parent).unwrap_or_default() + 1;
        let (sector, number) = (u32::try_from(sector).unwrap_or_default(), u16::try_from(number).unwrap_or_default());
        bytes.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
        bytes.push(0);
        if big_endian {
            bytes.extend(sector.to_be_bytes());
            bytes.extend(number.to_be_bytes());
        } else {
            bytes.extend(sector.to_le_bytes());
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(&name);
        if name.len() % 2 == 1 {
            bytes.push(0);
        }
    }
    bytes
}

fn descriptor(plan: &Plan, label: &str, sectors: usize) -> Vec<u8> {
    let joliet = plan.form == Form::Joliet;
    let text = |value: &str, length: usize| {
        let mut bytes = if joliet { ucs2(value) } else { value.as_bytes().to_vec() };
        while bytes.len() + 1 < length {
            bytes.extend(if joliet { &[0, b' '][..] } else { &[b' '][..] });
        }
        bytes.resize(length, if joliet { 0 } else { b' ' });
        bytes
    };
    let table_sectors = plan.table_size.div_ceil(SECTOR);
    let mut bytes = vec![if joliet { 2 } else { 1 }];
    bytes.extend(b"CD001\x01\0");
    bytes.extend(text("", 32)); // system
    bytes.extend(text(label, 32)); // volume
    bytes.extend([0; 8]);
    bytes.extend(both32(sectors));
    let mut escape = [0; 32];
    if joliet {
        escape[..3].copy_from_slice(b"%/E");
    }
    bytes.extend(escape);
    bytes.extend(both16(1)); // volumes of the set
    bytes.extend(both16(1)); // this volume
    bytes.extend(both16(2048));
    bytes.extend(both32(plan.table_size));
    let little = u32::try_from(plan.table_at).unwrap_or_default();
    let big = u32::try_from(plan.table_at + table_sectors).unwrap_or_default();
    bytes.extend(little.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(big.to_be_bytes());
    bytes.extend([0; 4]);
    let (sector, length) = plan.extents.first().copied().unwrap_or_default();
    bytes.extend(record(&[0], sector, length, true));
    for length in [128, 128, 128, 128] {
        bytes.extend(text("", length)); // volume set, publisher, preparer, application
    }
    for length in [37, 37, 37] {
        bytes.extend(text("", length)); // copyright, abstract, bibliography
    }
    bytes.extend(VOLUME_TIME); // created
    bytes.extend(VOLUME_TIME); // modified
    bytes.extend(b"0000000000000000\0"); // expires never
    bytes.extend(VOLUME_TIME); // effective
    bytes.push(1);
    bytes
}

#[cfg(test)]
mod tests;
