//! The calls of libvirt that the `virt` crate does not cover. Every `unsafe` block of the crate is in this file.
#![allow(unsafe_code, reason = "event callbacks and a few calls exist in libvirt's C interface only")]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    ptr,
    sync::Arc,
};

use virt::{connect::Connect, domain::Domain, sys};

use super::stats::Parameter;
use crate::hypervisor::{DiskFailure, HypervisorError, Signals};

/// Domain events with a callback.
const LIFECYCLE_LIKE: [sys::virDomainEventID; 4] = [
    sys::VIR_DOMAIN_EVENT_ID_LIFECYCLE,
    sys::VIR_DOMAIN_EVENT_ID_REBOOT,
    sys::VIR_DOMAIN_EVENT_ID_IO_ERROR_REASON,
    sys::VIR_DOMAIN_EVENT_ID_BALLOON_CHANGE,
];

/// Callbacks registered with one connection; dropping it removes them.
pub(super) struct Registrations {
    connect: Connect,
    ids: Vec<c_int>,
    close: bool,
}

impl Registrations {
    pub(super) fn new(connect: &Connect, signals: &Arc<Signals>) -> Result<Self, HypervisorError> {
        let mut registrations = Self { connect: connect.clone(), ids: Vec::new(), close: false };
        for event in LIFECYCLE_LIKE {
            // The trampolines differ in the parameters they skip; each matches the signature of its event.
            let callback = match event {
                sys::VIR_DOMAIN_EVENT_ID_LIFECYCLE => generic(on_lifecycle as *const c_void),
                sys::VIR_DOMAIN_EVENT_ID_IO_ERROR_REASON => generic(on_io_error as *const c_void),
                sys::VIR_DOMAIN_EVENT_ID_BALLOON_CHANGE => generic(on_balloon as *const c_void),
                _ => generic(on_generic as *const c_void),
            };
            registrations.register(event, callback, signals)?;
        }
        for event in [sys::VIR_DOMAIN_EVENT_ID_DEVICE_REMOVED, sys::VIR_DOMAIN_EVENT_ID_DEVICE_REMOVAL_FAILED] {
            registrations.register(event, generic(on_device as *const c_void), signals)?;
        }
        registrations.register(
            sys::VIR_DOMAIN_EVENT_ID_MEMORY_DEVICE_SIZE_CHANGE,
            generic(on_memory_device as *const c_void),
            signals,
        )?;
        registrations.register(
            sys::VIR_DOMAIN_EVENT_ID_AGENT_LIFECYCLE,
            generic(on_agent as *const c_void),
            signals,
        )?;
        let opaque = Arc::into_raw(signals.clone());
        // SAFETY: the connection is open; `opaque` is a counted reference that `release` gives back when libvirt drops
        // the callback.
        let result = unsafe {
            sys::virConnectRegisterCloseCallback(
                connect.as_ptr(),
                Some(on_close),
                opaque.cast_mut().cast(),
                Some(release),
            )
        };
        if result < 0 {
            // SAFETY: registering failed, so libvirt did not keep the reference made above.
            drop(unsafe { Arc::from_raw(opaque) });
            return Err(last_error());
        }
        registrations.close = true;
        Ok(registrations)
    }

    fn register(
        &mut self,
        event: sys::virDomainEventID,
        callback: sys::virConnectDomainEventGenericCallback,
        signals: &Arc<Signals>,
    ) -> Result<(), HypervisorError> {
        let opaque = Arc::into_raw(signals.clone());
        // SAFETY: the connection is open; the callback has the signature of its event; `opaque` is a counted reference
        // that `release` gives back when libvirt drops the callback.
        let id = unsafe {
            sys::virConnectDomainEventRegisterAny(
                self.connect.as_ptr(),
                ptr::null_mut(),
                event as c_int,
                callback,
                opaque.cast_mut().cast(),
                Some(release),
            )
        };
        if id < 0 {
            // SAFETY: registering failed, so libvirt did not keep the reference made above.
            drop(unsafe { Arc::from_raw(opaque) });
            return Err(last_error());
        }
        self.ids.push(id);
        Ok(())
    }
}

impl Drop for Registrations {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            // SAFETY: the connection is referenced by `self`, the id was given by it. A failure (connection gone) leaves
            // nothing to be done.
            unsafe { sys::virConnectDomainEventDeregisterAny(self.connect.as_ptr(), id) };
        }
        if self.close {
            // SAFETY: as above; the callback is the one that was registered.
            unsafe { sys::virConnectUnregisterCloseCallback(self.connect.as_ptr(), Some(on_close)) };
        }
    }
}

/// libvirt takes every event callback as the generic type and calls it as the type that belongs to the event's id.
fn generic(callback: *const c_void) -> sys::virConnectDomainEventGenericCallback {
    // SAFETY: function pointers have one representation; libvirt casts the pointer back to the event's own type before
    // it calls it, and the callers pass a function of that type.
    unsafe { std::mem::transmute::<*const c_void, sys::virConnectDomainEventGenericCallback>(callback) }
}

/// Releases the reference that a callback held.
unsafe extern "C" fn release(opaque: *mut c_void) {
    // SAFETY: `opaque` came from `Arc::into_raw` and libvirt calls this once for it.
    drop(unsafe { Arc::from_raw(opaque.cast::<Signals>().cast_const()) });
}

/// The signals behind a callback's opaque pointer.
///
/// # Safety
/// `opaque` must come from the registration of a callback that is still registered.
unsafe fn signals<'a>(opaque: *mut c_void) -> &'a Signals {
    // SAFETY: the registration holds a counted reference for as long as libvirt may call back.
    unsafe { &*opaque.cast::<Signals>() }
}

unsafe extern "C" fn on_lifecycle(
    _: sys::virConnectPtr,
    _: sys::virDomainPtr,
    event: c_int,
    _detail: c_int,
    opaque: *mut c_void,
) -> c_int {
    // SAFETY: called by libvirt with the pointer of a live registration.
    let signals = unsafe { signals(opaque) };
    match u32::try_from(event) {
        Ok(sys::VIR_DOMAIN_EVENT_CRASHED) => signals.set_crashed(),
        // QEMU reports that it runs the guest before libvirt reports that the start is complete.
        Ok(sys::VIR_DOMAIN_EVENT_RESUMED) => signals.set_running(),
        _ => signals.set_changed(),
    }
    0
}

unsafe extern "C" fn on_generic(_: sys::virConnectPtr, _: sys::virDomainPtr, opaque: *mut c_void) {
    // SAFETY: called by libvirt with the pointer of a live registration.
    unsafe { signals(opaque) }.set_changed();
}

unsafe extern "C" fn on_io_error(
    _: sys::virConnectPtr,
    _: sys::virDomainPtr,
    _path: *const c_char,
    alias: *const c_char,
    _action: c_int,
    reason: *const c_char,
    opaque: *mut c_void,
) {
    // SAFETY: libvirt passes strings that live for the call.
    let (alias, reason) = unsafe { (text(alias), text(reason)) };
    tracing::warn!(disk = alias, reason, "input/output error of a disk");
    // SAFETY: called by libvirt with the pointer of a live registration.
    unsafe { signals(opaque) }.set_changed();
}

unsafe extern "C" fn on_balloon(_: sys::virConnectPtr, _: sys::virDomainPtr, _actual: u64, opaque: *mut c_void) {
    // SAFETY: called by libvirt with the pointer of a live registration.
    unsafe { signals(opaque) }.set_changed();
}

unsafe extern "C" fn on_device(
    _: sys::virConnectPtr,
    _: sys::virDomainPtr,
    _alias: *const c_char,
    opaque: *mut c_void,
) {
    // SAFETY: called by libvirt with the pointer of a live registration.
    unsafe { signals(opaque) }.set_changed();
}

unsafe extern "C" fn on_memory_device(
    _: sys::virConnectPtr,
    _: sys::virDomainPtr,
    _alias: *const c_char,
    _size: u64,
    opaque: *mut c_void,
) {
    // SAFETY: called by libvirt with the pointer of a live registration.
    unsafe { signals(opaque) }.set_changed();
}

unsafe extern "C" fn on_agent(
    _: sys::virConnectPtr,
    _: sys::virDomainPtr,
    state: c_int,
    _reason: c_int,
    opaque: *mut c_void,
) {
    // SAFETY: called by libvirt with the pointer of a live registration.
    let signals = unsafe { signals(opaque) };
    signals.set_guest_agent_connected(match u32::try_from(state).unwrap_or_default() {
        sys::VIR_CONNECT_DOMAIN_EVENT_AGENT_LIFECYCLE_STATE_CONNECTED => Some(true),
        sys::VIR_CONNECT_DOMAIN_EVENT_AGENT_LIFECYCLE_STATE_DISCONNECTED => Some(false),
        _ => None,
    });
}

unsafe extern "C" fn on_close(_: sys::virConnectPtr, _reason: c_int, opaque: *mut c_void) {
    // SAFETY: called by libvirt with the pointer of a live registration.
    unsafe { signals(opaque) }.set_closed();
}

/// # Safety
/// `pointer` must be null or point to a string that ends with a zero byte and outlives the result's use.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: by the contract above.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// Returns this thread's last libvirt error.
fn last_error() -> HypervisorError {
    virt::error::Error::last_error().into()
}

/// Returns the number of this thread's last libvirt error.
pub(super) fn last_code() -> u32 {
    // SAFETY: returns null or a pointer to thread-local storage that stays valid until the next libvirt call.
    let error = unsafe { sys::virGetLastError() };
    if error.is_null() {
        return 0;
    }
    // SAFETY: not null, see above.
    u32::try_from(unsafe { (*error).code }).unwrap_or_default()
}

/// Returns libvirt's statistics of a domain as named parameters.
pub(super) fn domain_stats(domain: &Domain) -> Result<Vec<(String, Parameter)>, HypervisorError> {
    const KINDS: u32 = sys::VIR_DOMAIN_STATS_CPU_TOTAL
        | sys::VIR_DOMAIN_STATS_BALLOON
        | sys::VIR_DOMAIN_STATS_VCPU
        | sys::VIR_DOMAIN_STATS_INTERFACE
        | sys::VIR_DOMAIN_STATS_BLOCK;
    let mut domains = [domain.as_ptr(), ptr::null_mut()];
    let mut records: *mut sys::virDomainStatsRecordPtr = ptr::null_mut();
    let flags = sys::VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT;
    // SAFETY: the list ends with null and the domain in it is alive; the out pointer is valid for the call.
    let count = unsafe { sys::virDomainListGetStats(domains.as_mut_ptr(), KINDS, &raw mut records, flags) };
    if count < 0 {
        return Err(last_error());
    }
    let mut list = Vec::new();
    if count > 0 {
        // SAFETY: libvirt returned at least one record, which has `nparams` parameters.
        list = unsafe {
            let record = &**records;
            parameters(record.params, record.nparams)
        };
    }
    // SAFETY: the list came from libvirt, is freed once, and nothing refers to it any more.
    unsafe { sys::virDomainStatsRecordListFree(records) };
    Ok(list)
}

/// Returns the maps of the host's processors on which the vCPUs of a domain may run, one after the other. A vCPU that is not
/// pinned has all.
pub(super) fn vcpu_maps(domain: &Domain, vcpus: usize) -> Result<Vec<u8>, HypervisorError> {
    /// Bytes of a map: more processors than hosts have.
    const MAP: usize = 512;
    let (Ok(count), Ok(length)) = (c_int::try_from(vcpus), c_int::try_from(MAP)) else { return Ok(Vec::new()) };
    if count == 0 {
        return Ok(Vec::new());
    }
    let mut maps = vec![0; vcpus * MAP];
    // SAFETY: the domain is alive, and there are `count` maps of `length` bytes.
    let filled = unsafe { sys::virDomainGetVcpuPinInfo(domain.as_ptr(), count, maps.as_mut_ptr(), length, 0) };
    let filled = usize::try_from(filled).map_err(|_| last_error())?;
    maps.truncate(filled.saturating_mul(MAP));
    Ok(maps)
}

/// Copies named parameters.
///
/// # Safety
/// `params` must point to `count` parameters of libvirt, or `count` must be 0.
unsafe fn parameters(params: sys::virTypedParameterPtr, count: c_int) -> Vec<(String, Parameter)> {
    let mut list = Vec::new();
    for i in 0..usize::try_from(count).unwrap_or_default() {
        // SAFETY: there are `count` parameters.
        let param = unsafe { &*params.add(i) };
        // SAFETY: the field is a string that ends with a zero byte within its 80 bytes.
        let name = unsafe { text(param.field.as_ptr()) };
        let value = match u32::try_from(param.type_).unwrap_or_default() {
            // SAFETY: the type says which member of the union is set.
            sys::VIR_TYPED_PARAM_STRING => Parameter::Text(unsafe { text(param.value.s) }),
            // SAFETY: as above.
            sys::VIR_TYPED_PARAM_UINT => Parameter::Number(u64::from(unsafe { param.value.ui })),
            // SAFETY: as above.
            sys::VIR_TYPED_PARAM_ULLONG => Parameter::Number(unsafe { param.value.ul }),
            sys::VIR_TYPED_PARAM_INT => {
                // SAFETY: as above.
                Parameter::Number(u64::try_from(unsafe { param.value.i }).unwrap_or_default())
            }
            _ => continue,
        };
        list.push((name, value));
    }
    list
}

/// Returns libvirt's statistics of a domain's job as named parameters; empty without a job.
pub(super) fn job_stats(domain: &Domain) -> Result<Vec<(String, Parameter)>, HypervisorError> {
    let (mut kind, mut count) = (0, 0);
    let mut params: sys::virTypedParameterPtr = ptr::null_mut();
    // SAFETY: the domain is alive; the out pointers are valid for the call.
    let result =
        unsafe { sys::virDomainGetJobStats(domain.as_ptr(), &raw mut kind, &raw mut params, &raw mut count, 0) };
    if result < 0 {
        return Err(last_error());
    }
    // SAFETY: libvirt has filled `count` parameters.
    let list = unsafe { parameters(params, count) };
    // SAFETY: the parameters came from libvirt, are freed once, and nothing refers to them any more.
    unsafe { sys::virTypedParamsFree(params, count) };
    let is_in_progress = matches!(u32::try_from(kind), Ok(sys::VIR_DOMAIN_JOB_BOUNDED | sys::VIR_DOMAIN_JOB_UNBOUNDED));
    Ok(if is_in_progress { list } else { Vec::new() })
}

pub(super) fn abort_job(domain: &Domain) -> Result<(), HypervisorError> {
    // SAFETY: the domain is alive.
    if unsafe { sys::virDomainAbortJob(domain.as_ptr()) } < 0 { Err(last_error()) } else { Ok(()) }
}

/// Writes the memory of a domain to a file and ends it.
pub(super) fn save(domain: &Domain, path: &str) -> Result<(), HypervisorError> {
    let path = CString::new(path).map_err(|_| HypervisorError::ZeroByte)?;
    // SAFETY: the domain and the text are alive.
    if unsafe { sys::virDomainSave(domain.as_ptr(), path.as_ptr()) } < 0 { Err(last_error()) } else { Ok(()) }
}

/// Lets the guest of a domain's migration leave before all of its memory is copied.
pub(super) fn start_post_copy(domain: &Domain) -> Result<(), HypervisorError> {
    // SAFETY: the domain is alive; there are no flags.
    if unsafe { sys::virDomainMigrateStartPostCopy(domain.as_ptr(), 0) } < 0 { Err(last_error()) } else { Ok(()) }
}

/// Returns the disks of a running domain with an error, by target.
pub(super) fn disk_errors(domain: &Domain) -> Result<Vec<(String, DiskFailure)>, HypervisorError> {
    /// More disks than a domain has.
    const MOST: usize = 1024;
    // SAFETY: the domain is alive; without a list libvirt answers with the number of disks.
    let count = unsafe { sys::virDomainGetDiskErrors(domain.as_ptr(), ptr::null_mut(), 0, 0) };
    let count = usize::try_from(count).map_err(|_| last_error())?.min(MOST);
    if count == 0 {
        return Ok(Vec::new());
    }
    let mut list = vec![sys::virDomainDiskError { disk: ptr::null_mut(), error: 0 }; count];
    let room = u32::try_from(count).unwrap_or_default();
    // SAFETY: the domain is alive, and the list has room for as many entries as is said.
    let filled = unsafe { sys::virDomainGetDiskErrors(domain.as_ptr(), list.as_mut_ptr(), room, 0) };
    let filled = usize::try_from(filled).map_err(|_| last_error())?;
    let mut errors = Vec::new();
    for entry in list.iter().take(filled) {
        // SAFETY: libvirt has filled this entry; its name is null or a string that ends with a zero byte.
        let target = unsafe { text(entry.disk) };
        // SAFETY: libvirt allocated the name with malloc and hands it over; it is freed once, and free takes null.
        unsafe { nix::libc::free(entry.disk.cast()) };
        match u32::try_from(entry.error).unwrap_or_default() {
            sys::VIR_DOMAIN_DISK_ERROR_NONE => {}
            sys::VIR_DOMAIN_DISK_ERROR_NO_SPACE => errors.push((target, DiskFailure::NoSpace)),
            _ => errors.push((target, DiskFailure::InputOutput)),
        }
    }
    Ok(errors)
}

/// Returns libvirt's description of the domains the host can run.
pub(super) fn domain_capabilities(
    connect: &Connect,
    machine_type: &str,
    virtualization: &str,
) -> Result<String, HypervisorError> {
    let machine_type = CString::new(machine_type).map_err(|_| HypervisorError::ZeroByte)?;
    let virtualization = CString::new(virtualization).map_err(|_| HypervisorError::ZeroByte)?;
    // SAFETY: the connection is open, the strings live for the call, null means "the default".
    let xml = unsafe {
        sys::virConnectGetDomainCapabilities(
            connect.as_ptr(),
            ptr::null(),
            ptr::null(),
            machine_type.as_ptr(),
            virtualization.as_ptr(),
            0,
        )
    };
    if xml.is_null() {
        return Err(last_error());
    }
    // SAFETY: not null; a string that ends with a zero byte and is ours.
    let copy = unsafe { text(xml) };
    // SAFETY: libvirt allocated it with malloc and hands it over; it is freed once.
    unsafe { nix::libc::free(xml.cast()) };
    Ok(copy)
}
