//! The prologue of a device program. Pure.
//!
//! A program gets a pointer to kind and access, major and minor number in register 1, and returns 1 to permit. The prologue
//! leaves register 1 as it is:
//!
//! ```text
//!   r0 = MARK                      recognises the prologue
//!   r0 = number of devices         its length follows
//!   r2 = kind and access
//!   if r2 & MKNOD goto end
//!   r2 &= 0xffff
//!   if r2 != BLOCK goto end
//!   r3 = major
//!   r4 = minor
//!   for each device:  if r3 != MAJOR goto next; if r4 != MINOR goto next; r0 = 1; exit
//!   end: the former program
//! ```
//!
//! Jumps are relative, so that the former program needs no change.

use std::collections::BTreeSet;

/// Value that recognises a prologue.
const MARK: i32 = 0x4656_4d44;
/// Instructions before those of the devices, and of each device.
const HEAD: usize = 8;
const OF_DEVICE: usize = 4;
/// Most devices. Jumps over all of them have 16 bits.
const MAX_DEVICES: usize = 512;

/// Codes of instructions.
const MOVE: u8 = 0xb7;
const LOAD_WORD: u8 = 0x61;
const AND: u8 = 0x57;
const JUMP_NOT_EQUAL: u8 = 0x55;
const JUMP_SET: u8 = 0x45;
const EXIT: u8 = 0x95;

/// Kind of device, and the access that creates a node, as the kernel encodes both.
const BLOCK: i32 = 1;
const MKNOD: i32 = 1 << 16;

pub(super) type Instruction = [u8; 8];

/// Block devices by major and minor number.
pub(super) type Devices = BTreeSet<(u32, u32)>;

/// Reason why a program cannot be changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    /// Too many devices.
    #[error("more than {MAX_DEVICES} block devices are granted")]
    TooMany,
    /// A number of a device exceeds the range of the kernel.
    #[error("device {0}:{1} is out of range")]
    OutOfRange(u32, u32),
    /// Another program changed the prologue.
    #[error("the prologue of the device program was changed")]
    Changed,
}

fn instruction(code: u8, target: u8, source: u8, offset: i16, immediate: i32) -> Instruction {
    let [o0, o1] = offset.to_le_bytes();
    let [i0, i1, i2, i3] = immediate.to_le_bytes();
    [code, (source << 4) | target, o0, o1, i0, i1, i2, i3]
}

fn immediate([_, _, _, _, a, b, c, d]: Instruction) -> i32 {
    i32::from_le_bytes([a, b, c, d])
}

/// Returns a program that permits the devices and else continues with `rest`.
pub(super) fn join(devices: &Devices, rest: &[Instruction]) -> Result<Vec<Instruction>, Error> {
    if devices.is_empty() {
        return Ok(rest.to_vec());
    }
    if devices.len() > MAX_DEVICES {
        return Err(Error::TooMany);
    }
    let count = i32::try_from(devices.len()).map_err(|_| Error::TooMany)?;
    let tail = i16::try_from(devices.len() * OF_DEVICE).map_err(|_| Error::TooMany)?;
    let mut program = vec![
        instruction(MOVE, 0, 0, 0, MARK),
        instruction(MOVE, 0, 0, 0, count),
        instruction(LOAD_WORD, 2, 1, 0, 0),
        instruction(JUMP_SET, 2, 0, tail + 4, MKNOD),
        instruction(AND, 2, 0, 0, 0xffff),
        instruction(JUMP_NOT_EQUAL, 2, 0, tail + 2, BLOCK),
        instruction(LOAD_WORD, 3, 1, 4, 0),
        instruction(LOAD_WORD, 4, 1, 8, 0),
    ];
    for &(major, minor) in devices {
        let number = |number: u32| i32::try_from(number).map_err(|_| Error::OutOfRange(major, minor));
        program.extend([
            instruction(JUMP_NOT_EQUAL, 3, 0, 3, number(major)?),
            instruction(JUMP_NOT_EQUAL, 4, 0, 2, number(minor)?),
            instruction(MOVE, 0, 0, 0, 1),
            instruction(EXIT, 0, 0, 0, 0),
        ]);
    }
    program.extend_from_slice(rest);
    Ok(program)
}

/// Splits a program into the devices of its prologue and the former program.
pub(super) fn split(program: &[Instruction]) -> Result<(Devices, Vec<Instruction>), Error> {
    if program.first() != Some(&instruction(MOVE, 0, 0, 0, MARK)) {
        return Ok((BTreeSet::new(), program.to_vec()));
    }
    let count = program.get(1).and_then(|second| usize::try_from(immediate(*second)).ok()).ok_or(Error::Changed)?;
    if count > MAX_DEVICES {
        return Err(Error::Changed);
    }
    let length = HEAD + count * OF_DEVICE;
    let (prologue, rest) = program.split_at_checked(length).ok_or(Error::Changed)?;
    let number = |instruction: Option<&Instruction>| {
        instruction.and_then(|instruction| u32::try_from(immediate(*instruction)).ok()).ok_or(Error::Changed)
    };
    let of_devices = prologue.get(HEAD..).unwrap_or_default().chunks(OF_DEVICE);
    let devices = of_devices
        .map(|device| Ok((number(device.first())?, number(device.get(1))?)))
        .collect::<Result<Devices, Error>>()?;
    // The prologue was written by this version only if these devices yield the same program again.
    if join(&devices, rest)?.as_slice() != program {
        return Err(Error::Changed);
    }
    Ok((devices, rest.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Interprets a program for one access. Panics on an instruction that neither prologues nor the tests use.
    fn permits(program: &[Instruction], kind: u32, access: u32, device: (u32, u32)) -> bool {
        let context = [(access << 16) | kind, device.0, device.1];
        let (mut registers, mut at) = ([0_u64; 11], 0_usize);
        loop {
            let [code, places, o0, o1, ..] = program[at];
            let (target, source) = (usize::from(places & 15), usize::from(places >> 4));
            let value = i64::from(immediate(program[at])) as u64;
            let offset = i16::from_le_bytes([o0, o1]);
            let jump = usize::try_from(offset).unwrap();
            at += 1;
            match code {
                MOVE => registers[target] = value,
                LOAD_WORD => {
                    assert_eq!(source, 1);
                    registers[target] = u64::from(context[jump / 4]);
                }
                AND => registers[target] &= value,
                JUMP_NOT_EQUAL if registers[target] != value => at += jump,
                JUMP_SET if registers[target] & value != 0 => at += jump,
                JUMP_NOT_EQUAL | JUMP_SET => {}
                EXIT => return registers[0] == 1,
                _ => panic!("{code:#x}"),
            }
        }
    }

    /// A program that permits character devices of major number 1 only.
    fn former() -> Vec<Instruction> {
        vec![
            instruction(LOAD_WORD, 2, 1, 0, 0),
            instruction(AND, 2, 0, 0, 0xffff),
            instruction(JUMP_NOT_EQUAL, 2, 0, 4, 2),
            instruction(LOAD_WORD, 3, 1, 4, 0),
            instruction(JUMP_NOT_EQUAL, 3, 0, 2, 1),
            instruction(MOVE, 0, 0, 0, 1),
            instruction(EXIT, 0, 0, 0, 0),
            instruction(MOVE, 0, 0, 0, 0),
            instruction(EXIT, 0, 0, 0, 0),
        ]
    }

    #[test]
    fn granted_devices_can_be_read_and_written_and_the_former_program_decides_on_the_rest() {
        let (mknod, read, write) = (1, 2, 4);
        let (block, character) = (1, 2);
        let devices = BTreeSet::from([(7, 3), (253, 0)]);
        let program = join(&devices, &former()).unwrap();
        for (kind, access, device, granted) in [
            (block, read, (7, 3), true),
            (block, read | write, (253, 0), true),
            (block, write, (7, 4), false),
            (block, write, (253, 3), false),
            (block, mknod, (7, 3), false),
            (block, mknod | read, (7, 3), false),
            (character, read, (7, 3), false),
            (character, read, (1, 5), true),
            (character, mknod, (1, 5), true),
        ] {
            assert_eq!(permits(&program, kind, access, device), granted, "{kind} {access} {device:?}");
        }
        assert!(!permits(&former(), block, read, (7, 3)));
    }

    #[test]
    fn the_prologue_is_recognised_and_removed_with_its_last_device() {
        let devices = BTreeSet::from([(7, 3), (8, 16), (259, 1)]);
        let program = join(&devices, &former()).unwrap();
        assert_eq!(split(&program), Ok((devices, former())));
        assert_eq!(split(&former()), Ok((BTreeSet::new(), former())));
        assert_eq!(join(&BTreeSet::new(), &former()), Ok(former()));
        assert_eq!(split(&[]), Ok((BTreeSet::new(), Vec::new())));
    }

    #[test]
    fn a_prologue_that_was_changed_is_not_used() {
        let program = join(&BTreeSet::from([(7, 3)]), &former()).unwrap();
        for (place, value) in [
            (1, instruction(MOVE, 0, 0, 0, 2)),
            (1, instruction(MOVE, 0, 0, 0, -1)),
            (1, instruction(MOVE, 0, 0, 0, i32::MAX)),
            (5, instruction(EXIT, 0, 0, 0, 0)),
            (8, instruction(JUMP_NOT_EQUAL, 3, 0, 3, -1)),
        ] {
            let mut changed = program.clone();
            changed[place] = value;
            assert_eq!(split(&changed), Err(Error::Changed), "{place}");
        }
        assert_eq!(split(&program[..9]), Err(Error::Changed));
    }

    #[test]
    fn numbers_are_bounded() {
        let many: BTreeSet<(u32, u32)> = (0..=512).map(|minor| (7, minor)).collect();
        assert_eq!(join(&many, &[]), Err(Error::TooMany));
        assert_eq!(join(&BTreeSet::from([(u32::MAX, 1)]), &[]), Err(Error::OutOfRange(u32::MAX, 1)));
    }
}
