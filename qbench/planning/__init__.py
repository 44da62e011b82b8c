"""Planning: from measured cells to proposals, and from measured proposals to a plan file."""
