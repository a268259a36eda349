// Command nslookup prints the addresses of a name and fails where it has none.
// Unlike busybox's, it follows the search domains of resolv.conf, which the Training Operator's
// init container counts on.
package main

import (
	"fmt"
	"net"
	"os"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: nslookup NAME")
		os.Exit(2)
	}
	addresses, err := net.LookupHost(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for _, address := range addresses {
		fmt.Println(address)
	}
}
