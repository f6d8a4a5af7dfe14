//! The system call `bpf` for device programs. Every `unsafe` block of the crate is in this file.
#![allow(unsafe_code, reason = "no safe wrapper of the system call exists among the dependencies")]

use std::{
    io,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
};

use nix::libc;

use super::{Error, program::Instruction};

/// Commands.
const LOAD: libc::c_int = 5;
const ATTACH: libc::c_int = 8;
const OPEN_BY_ID: libc::c_int = 13;
const INFO: libc::c_int = 15;
const QUERY: libc::c_int = 16;

/// Kinds of programs and attachments.
const PROGRAM_OF_DEVICES: u32 = 15;
const ATTACHED_FOR_DEVICES: u32 = 6;
/// Flags of an attachment.
const MULTI: u32 = 1 << 1;
const REPLACE: u32 = 1 << 2;
/// Most programs of a group, the kernel's limit.
const MAX_PROGRAMS: usize = 64;
/// Most instructions that are read. Container runtimes write some hundred.
const MAX_INSTRUCTIONS: usize = 64 * 1024;
/// License of programs. They call no function of the kernel that requires another.
const LICENSE: &std::ffi::CStr = c"Apache-2.0";

/// Programs of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Attached {
    /// Their numbers.
    pub(super) programs: Vec<u32>,
    /// Flags with which they are attached.
    pub(super) flags: u32,
}

/// A loaded program.
#[derive(Debug)]
pub(super) struct Program(OwnedFd);

#[repr(C)]
#[derive(Default)]
struct LoadArguments {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    attachment: u32,
}

#[repr(C)]
#[derive(Default)]
struct AttachArguments {
    group: u32,
    program: u32,
    attachment: u32,
    flags: u32,
    replaced: u32,
}

#[repr(C)]
#[derive(Default)]
struct OpenArguments {
    id: u32,
    next: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct InfoArguments {
    program: u32,
    length: u32,
    info: u64,
}

/// The first members of the kernel's structure.
#[repr(C)]
#[derive(Default)]
struct Info {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    machine_code_length: u32,
    length: u32,
    machine_code: u64,
    instructions: u64,
}

#[repr(C)]
#[derive(Default)]
struct QueryArguments {
    group: u32,
    attachment: u32,
    query_flags: u32,
    flags: u32,
    programs: u64,
    count: u32,
    padding: u32,
}

/// Calls the kernel.
fn call<T>(operation: &'static str, command: libc::c_int, arguments: &mut T) -> Result<RawFd, Error> {
    let size = u32::try_from(size_of::<T>()).unwrap_or_default();
    // SAFETY: `arguments` is a structure of the command's layout that lives for the call, and `size` is its size. Pointers in
    // it come from the callers in this file, which pass buffers of the lengths that they state and that live for the call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(arguments), size) };
    if result < 0 {
        return Err(Error::Kernel { operation, source: io::Error::last_os_error() });
    }
    Ok(RawFd::try_from(result).unwrap_or_default())
}

/// Calls the kernel for a new descriptor.
fn call_for_descriptor<T>(operation: &'static str, command: libc::c_int, arguments: &mut T) -> Result<OwnedFd, Error> {
    let descriptor = call(operation, command, arguments)?;
    // SAFETY: the commands of the callers return a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

fn number(descriptor: &impl AsFd) -> u32 {
    u32::try_from(descriptor.as_fd().as_raw_fd()).unwrap_or_default()
}

fn address<T>(buffer: *const T) -> u64 {
    u64::try_from(buffer.addr()).unwrap_or_default()
}

/// Returns the programs that are attached to a group itself.
pub(super) fn query(group: &impl AsFd) -> Result<Attached, Error> {
    let mut programs = vec![0_u32; MAX_PROGRAMS];
    let mut arguments = QueryArguments {
        group: number(group),
        attachment: ATTACHED_FOR_DEVICES,
        programs: address(programs.as_mut_ptr()),
        count: u32::try_from(MAX_PROGRAMS).unwrap_or_default(),
        ..QueryArguments::default()
    };
    call("find", QUERY, &mut arguments)?;
    programs.truncate(usize::try_from(arguments.count).unwrap_or_default());
    Ok(Attached { programs, flags: arguments.flags })
}

/// Opens a program by its number.
pub(super) fn open(id: u32) -> Result<Program, Error> {
    let mut arguments = OpenArguments { id, ..OpenArguments::default() };
    call_for_descriptor("open", OPEN_BY_ID, &mut arguments).map(Program)
}

/// Reads the instructions of a program. The kernel changes none of a device program.
pub(super) fn instructions(program: &Program) -> Result<Vec<Instruction>, Error> {
    let read = |buffer: &mut [Instruction]| -> Result<usize, Error> {
        let mut info = Info {
            length: u32::try_from(size_of_val(buffer)).unwrap_or_default(),
            instructions: if buffer.is_empty() { 0 } else { address(buffer.as_mut_ptr()) },
            ..Info::default()
        };
        let mut arguments = InfoArguments {
            program: number(&program.0),
            length: u32::try_from(size_of::<Info>()).unwrap_or_default(),
            info: address(&raw mut info),
        };
        call("read", INFO, &mut arguments)?;
        Ok(usize::try_from(info.length).unwrap_or_default() / size_of::<Instruction>())
    };
    let too_long = || Error::Kernel { operation: "read", source: io::ErrorKind::FileTooLarge.into() };
    let count = Some(read(&mut [])?).filter(|count| *count <= MAX_INSTRUCTIONS).ok_or_else(too_long)?;
    let mut buffer = vec![[0; 8]; count];
    read(&mut buffer)?;
    Ok(buffer)
}

/// Loads a program.
pub(super) fn load(instructions: &[Instruction]) -> Result<Program, Error> {
    let mut arguments = LoadArguments {
        kind: PROGRAM_OF_DEVICES,
        count: u32::try_from(instructions.len()).unwrap_or_default(),
        instructions: address(instructions.as_ptr()),
        license: address(LICENSE.as_ptr()),
        attachment: ATTACHED_FOR_DEVICES,
        ..LoadArguments::default()
    };
    call_for_descriptor("load", LOAD, &mut arguments).map(Program)
}

/// Replaces an attached program in one step. `flags` are those of the former attachment.
pub(super) fn replace(group: &impl AsFd, former: &Program, new: &Program, flags: u32) -> Result<(), Error> {
    let several = flags & MULTI != 0;
    let mut arguments = AttachArguments {
        group: number(group),
        program: number(&new.0),
        attachment: ATTACHED_FOR_DEVICES,
        flags: if several { MULTI | REPLACE } else { flags },
        // Of a group with one program, the new one takes its place.
        replaced: if several { number(&former.0) } else { 0 },
    };
    call("replace", ATTACH, &mut arguments).map(drop)
}

/// Attaches a program beside others.
#[cfg(test)]
pub(super) fn attach(group: &impl AsFd, program: &Program) -> Result<(), Error> {
    let mut arguments = AttachArguments {
        group: number(group),
        program: number(&program.0),
        attachment: ATTACHED_FOR_DEVICES,
        flags: MULTI,
        replaced: 0,
    };
    call("attach", ATTACH, &mut arguments).map(drop)
}
