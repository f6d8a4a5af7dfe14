//! Checks that each disk image is accepted or refused after a bounded part of it was read.
//!
//! Input: pieces of an image: offset (4 bytes, big endian), length (2 bytes), and the bytes. All others are zero.

use std::{cell::Cell, io};

use importer::format::{self, ReadAt};

/// Largest image.
const IMAGE_LIMIT: usize = 4 << 20;
/// Limit of the bytes that are read.
const READ_LIMIT: usize = 512 << 10;
/// Bytes by which the format is found.
const PREFIX: usize = 512;

struct Counted<'a> {
    image: &'a [u8],
    read: Cell<usize>,
}

impl ReadAt for Counted<'_> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.image.read_at(offset, buffer)?;
        self.read.set(self.read.get() + count);
        Ok(count)
    }
}

/// Returns true if the input was an image.
pub fn check(input: &[u8]) -> bool {
    let Some(image) = image(input) else { return false };
    let Ok(found) = format::find(image.get(..PREFIX).unwrap_or(&image)) else { return true };
    let counted = Counted { image: &image, read: Cell::new(0) };
    let accepted = format::check(found, &counted).is_ok();
    assert!(counted.read.get() <= READ_LIMIT, "{} bytes were read", counted.read.get());
    // The names under which an image refers to its parent in plain text.
    let names_parent = image
        .get(PREFIX..10 << 10)
        .is_some_and(|text| text.to_ascii_lowercase().windows(18).any(|word| word == b"parentfilenamehint"));
    assert!(!(accepted && found == format::Format::Vmdk && names_parent), "a VMDK with a parent is accepted");
    true
}

fn image(mut input: &[u8]) -> Option<Vec<u8>> {
    let mut image = Vec::new();
    while !input.is_empty() {
        let (offset, rest) = input.split_first_chunk::<4>()?;
        let (length, rest) = rest.split_first_chunk::<2>()?;
        let offset = usize::try_from(u32::from_be_bytes(*offset)).ok()?;
        let (bytes, rest) = rest.split_at_checked(u16::from_be_bytes(*length).into())?;
        let end = offset.checked_add(bytes.len()).filter(|end| *end <= IMAGE_LIMIT)?;
        image.resize(image.len().max(end), 0);
        image.get_mut(offset..end)?.copy_from_slice(bytes);
        input = rest;
    }
    Some(image)
}
