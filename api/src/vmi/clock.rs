//! Clock and timers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Base of the guest's clock and its timers.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Clock {
    /// Timers of the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timer: Option<Timer>,
    /// Name of the time zone; excludes `utc`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timezone: Option<String>,
    /// UTC base with an optional offset; excludes `timezone`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utc: Option<ClockOffsetUtc>,
}

/// UTC base of the clock.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClockOffsetUtc {
    /// Offset from UTC in seconds. If unset, changes by the guest are kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset_seconds: Option<i32>,
}

/// Timers of the guest.
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
    /// Enables the timer; default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub present: Option<bool>,
    /// Treatment of ticks that the guest missed (`delay`, `catchup`, `merge`, `discard`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tick_policy: Option<String>,
}

/// Hyper-V reference clock.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HypervTimer {
    /// Enables the timer; default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub present: Option<bool>,
}

/// KVM paravirtual clock.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KvmTimer {
    /// Enables the timer; default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub present: Option<bool>,
}

/// Programmable interval timer.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PitTimer {
    /// Enables the timer; default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub present: Option<bool>,
    /// Treatment of ticks that the guest missed (`delay`, `catchup`, `merge`, `discard`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tick_policy: Option<String>,
}

/// Real time clock.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RtcTimer {
    /// Enables the timer; default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub present: Option<bool>,
    /// Treatment of ticks that the guest missed (`delay`, `catchup`, `merge`, `discard`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tick_policy: Option<String>,
    /// Time source: `guest` or `wall`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub track: Option<String>,
}
