"""The client side of the service: drafting that never fails or waits because a server does."""
