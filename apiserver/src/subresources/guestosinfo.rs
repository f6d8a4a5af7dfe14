//! `virtualmachineinstances/guestosinfo`: facts of the guest agent about the system.

use api::subresources::GuestAgentInfo;

use super::common::{
    guest_agent, schema,
    specification::{Answer, Content, Specification, VMIS},
};

pub(super) static SPECIFICATION: Specification = Specification {
    content: Content::JsonOrUnlabelled,
    plain_errors: true,
    operation: "Guestosinfo",
    description: "Get what the guest agent says about the system",
    ..Specification::get(VMIS, "guestosinfo", Answer::Document(schema::of::<GuestAgentInfo>), |call, _| {
        Box::pin(guest_agent::serve(call, "guestosinfo"))
    })
};
