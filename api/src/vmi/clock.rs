//! Clock and timers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Base of the guest's clock and its timers.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Clock {
    /// Timers offered to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timer: Option<Timer>,
    /// Time zone name the clock follows; excludes `utc`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timezone: Option<String>,
    /// UTC base, optionally shifted; excludes `timezone`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utc: Option<ClockOffsetUtc>,
}

/// UTC base of the clock.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClockOffsetUtc {
    /// Shift against UTC in seconds; without it the guest's own changes are kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset_seconds: Option<i32>,
}

/// Timers offered to the guest.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Timer {
    /// High precision event timer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hpet: Option<HpetTimer>,
    /// Hyper-V reference clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hyperv: Option<HypervTimer>,
    /// KVM paravirtual clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kvm: Option<KvmTimer>,
    /// Programmable interval timer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pit: Option<PitTimer>,
    /// Real time clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rtc: Option<RtcTimer>,
}

/// High precision event timer.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HpetTimer {
    /// Whether the timer exists; true when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub present: Option<bool>,
    /// What happens to ticks the guest missed (`delay`, `catchup`, `merge`, `discard`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tick_policy: Option<String>,
}

/// Hyper-V reference clock.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HypervTimer {
    /// Whether the timer exists; true when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub present: Option<bool>,
}

/// KVM paravirtual clock.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KvmTimer {
    /// Whether the timer exists; true when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub present: Option<bool>,
}

/// Programmable interval timer.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PitTimer {
    /// Whether the timer exists; true when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub present: Option<bool>,
    /// What happens to ticks the guest missed (`delay`, `catchup`, `merge`, `discard`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tick_policy: Option<String>,
}

/// Real time clock.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RtcTimer {
    /// Whether the timer exists; true when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub present: Option<bool>,
    /// What happens to ticks the guest missed (`delay`, `catchup`, `merge`, `discard`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tick_policy: Option<String>,
    /// Source the clock follows: `guest` or `wall`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub track: Option<String>,
}
