//! Users that are components of the installation.

use api::constants::component;
use k8s_openapi::api::authentication::v1::UserInfo;

/// Service accounts of the components, which may write fields that users may not.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TrustedUsers {
    prefix: String,
}

impl TrustedUsers {
    /// Returns the accounts of an installation in `namespace`.
    pub fn new(namespace: &str) -> Self {
        Self { prefix: format!("system:serviceaccount:{namespace}:") }
    }

    /// Returns the namespace of the installation.
    pub(crate) fn namespace(&self) -> &str {
        self.prefix.split(':').nth(2).unwrap_or_default()
    }

    fn account<'a>(&self, user: &'a UserInfo) -> Option<&'a str> {
        user.username.as_deref()?.strip_prefix(&self.prefix)
    }

    /// Returns true if the user is one of the components.
    pub(crate) fn contains(&self, user: &UserInfo) -> bool {
        self.account(user).is_some_and(|account| {
            [
                component::API_SERVICE_ACCOUNT,
                component::CONTROLLER_SERVICE_ACCOUNT,
                component::HANDLER_SERVICE_ACCOUNT,
                component::SYNCHRONIZATION_SERVICE_ACCOUNT,
            ]
            .contains(&account)
        })
    }

    /// Returns true if the user is the component with this service account.
    pub(crate) fn is(&self, user: &UserInfo, account: &str) -> bool {
        self.account(user) == Some(account)
    }

    /// Returns true if the user is virt-handler.
    pub(crate) fn is_handler(&self, user: &UserInfo) -> bool {
        self.is(user, component::HANDLER_SERVICE_ACCOUNT)
    }
}
