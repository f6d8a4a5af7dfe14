//! `virtualmachineinstances/filesystemlist`: the file systems mounted in the guest.

use api::subresources::GuestFileSystemList;

use super::common::{
    guest_agent, schema,
    specification::{Answer, Content, Specification, VMIS},
};

pub(super) static SPECIFICATION: Specification = Specification {
    content: Content::JsonOrUnlabelled,
    plain_errors: true,
    operation: "Filesystemlist",
    description: "Get the file systems mounted in the guest",
    ..Specification::get(VMIS, "filesystemlist", Answer::Document(schema::of::<GuestFileSystemList>), |call, _| {
        Box::pin(guest_agent::serve(call, "filesystemlist"))
    })
};
