//! `virtualmachineinstances/userlist`: the users logged in to the guest.

use api::subresources::GuestUserList;

use super::common::{
    guest_agent, schema,
    specification::{Answer, Content, Specification, VMIS},
};

pub(super) static SPECIFICATION: Specification = Specification {
    content: Content::JsonOrUnlabelled,
    plain_errors: true,
    operation: "Userlist",
    description: "Get the users logged in to the guest",
    ..Specification::get(VMIS, "userlist", Answer::Document(schema::of::<GuestUserList>), |call, _| {
        Box::pin(guest_agent::serve(call, "userlist"))
    })
};
