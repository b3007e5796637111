//! Copies owner, permissions and attributes to a file that replaces another. No user gains access;
//! no user loses access if the system permits that.

use std::ffi::CString;
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, fchown};

use crate::sys;

/// The attribute that holds the access control list.
const ACL: &std::ffi::CStr = c"system.posix_acl_access";

/// The metadata of a file that will be replaced.
pub(super) struct FileMetadata {
    /// The user and the group.
    pub(super) owner: (u32, u32),
    mode: u32,
    /// The access control list; an error if it cannot be read.
    acl: io::Result<Option<Vec<u8>>>,
    /// Attributes that say something about the file, and not about the bytes in it.
    attributes: Vec<(CString, Vec<u8>)>,
}

impl FileMetadata {
    /// Reads the metadata of a file. They stay known if the file is removed.
    pub(super) fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let mut attributes = Vec::new();
        for name in sys::attribute_names(file).unwrap_or(Vec::new()) {
            let text = name.to_bytes();
            let label = matches!(text, b"security.selinux" | b"security.SMACK64");
            if (label || text.starts_with(b"user."))
                && let Ok(Some(value)) = sys::attribute(file, &name)
            {
                attributes.push((name, value));
            }
        }
        Ok(FileMetadata {
            owner: (metadata.uid(), metadata.gid()),
            mode: metadata.mode() & 0o7777,
            acl: sys::attribute(file, ACL),
            attributes,
        })
    }

    /// Gives a file that only its owner can open this owner, group, access control list, labels,
    /// user attributes and permissions.
    ///
    /// Steps that the system refuses are skipped. The permissions are then restricted, so that the
    /// new owner, group and list give no user access without earlier access. Where these cannot be
    /// changed either, the file keeps those it was created with.
    pub(super) fn give(&self, new: &File) -> io::Result<()> {
        let owner = |file: &File| file.metadata().map(|found| (found.uid(), found.gid()));
        let (user, group) = self.owner;
        let mut is = owner(new)?;
        if is != self.owner {
            // Without privileges, the owner cannot be changed, and the group only to one of the
            // process's own groups.
            let _ =
                fchown(new, Some(user), Some(group)).or_else(|_| fchown(new, None, Some(group)));
            is = owner(new)?;
        }
        let mut mode = self.mode;
        if is != self.owner {
            // A setuid or setgid bit must not give the rights of the wrong user.
            mode &= !0o6000;
        }
        if is.1 != group {
            // Members of the old group are now others, and members of the new group were others,
            // so both classes get only the permissions that both had.
            let both = mode >> 3 & mode & 0o7;
            mode = mode & !0o77 | both << 3 | both;
        }
        if self.give_acl(new).is_err() {
            mode &= !0o77;
        }
        for (name, value) in &self.attributes {
            // Refused without the privilege, or where there is no room.
            let _ = sys::set_attribute(new, name, Some(value));
        }
        if new.metadata()?.mode() & 0o7777 != mode {
            let _ = new.set_permissions(Permissions::from_mode(mode));
        }
        Ok(())
    }

    /// Gives the access control list; without one the new file has none either, whatever its
    /// folder gives to new files.
    fn give_acl(&self, new: &File) -> io::Result<()> {
        let acl = self.acl.as_ref().map_err(|e| io::Error::from(e.kind()))?;
        if acl.is_none() && sys::attribute(new, ACL)?.is_none() {
            return Ok(());
        }
        sys::set_attribute(new, ACL, acl.as_deref())
    }
}
